"""The soak: a weighted random mix of good, bad and rude clients for minutes, after which nothing may be left behind.

`./test.sh --soak MINUTES`. It fails on a lost request, on memory or threads or descriptors that grow, on answers that
get slower, on a traceback that no armed fault explains, and when the books of server and clients differ. Every ten
minutes the server is reloaded under load, which no client may notice.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
from cases_engine import COMPUTING
from cases_process import reloads
from cases_queue import reset
from harness import MB, REFUSED, Pulse, Setting, Watched
from shared_servers import Fleet
from table import body

from tests.support import in_background, wait_until

pytestmark = [pytest.mark.process, pytest.mark.soak]
CLIENTS = 6
STARTUP = 0.25  # of the time: caches fill, then memory must be flat
WITHIN = 20 * MB  # of memory, from then on
GROWTH = 100 * MB  # of memory in all: caches and the threads' arenas fill first
STRETCH = 600.0  # seconds between two reloads
SLOWER = 1.5  # times the p99 of the first quarter may be that of the last
ENOUGH = 300  # requests in a quarter, for a p99
FAULTS = {name: COMPUTING.faults[name] for name in ("poison", "oom_for", "nan_row", "slow_step")}
SOAKED = Setting(faults=FAULTS, first=COMPUTING.first[:1])
Act = Callable[[Watched, random.Random], None]


def ask(server: Watched, path: str, sent: bytes, code: int = 200) -> None:
    """Send a request that must be answered so; six clients never fill the places, so that none is refused."""
    answer = server.ask(path, sent)
    assert answer.status == code, (path, sent[:100], answer.status, answer.body[:300])


def short(server: Watched, rng: random.Random) -> None:
    path = rng.choice(list(REFUSED))
    ask(server, path, body(path, tokens=rng.randint(1, 20), seed=rng.randrange(99)))


def golden(server: Watched, rng: random.Random) -> None:
    assert server.canary() == server.golden


def long(server: Watched, rng: random.Random) -> None:
    ask(server, "/inference", body("/inference", "y" * rng.randint(1, 500), rng.randint(100, 400)))


def stream(server: Watched, rng: random.Random) -> None:
    answer = server.ask("/v1/completions", body("/v1/completions", tokens=50, stream=True))
    assert answer.body.endswith(b"data: [DONE]\n\n")


def cut_stream(server: Watched, rng: random.Random) -> None:
    with server.begin("/inference", body("/inference", tokens=300, stream=True)) as sock:
        sock.recv(rng.randint(1, 2000))
        rng.choice((reset, lambda sock: sock.close()))(sock)
    server.ledger.leave()


def crash(server: Watched, rng: random.Random) -> None:
    id = f"{rng.getrandbits(60):x}"
    sock = server.begin("/inference", body("/inference", tokens=200), id)
    wait_until(lambda: server.knows(id))
    time.sleep(rng.random() / 20)
    reset(sock)
    server.ledger.leave()


def impatient(server: Watched, rng: random.Random) -> None:
    answer = server.ask("/inference", body("/inference", tokens=500), X_Request_Timeout="0.1")
    assert answer.status == 504


def bad(server: Watched, rng: random.Random) -> None:
    path, code = rng.choice(list(REFUSED.items()))
    ask(server, path, rng.choice((b"", b"{bad", b"[]", body(path, tokens=0), body(path, prompt=5))), code)


def too_large(server: Watched, rng: random.Random) -> None:
    ask(server, "/inference", b"x" * (2 * MB), 413)


def poison(server: Watched, rng: random.Random) -> None:
    for words, code in (("POISON", 500), ("NOTNUM", 500), ("HUGE", 503)):
        ask(server, "/inference", body("/inference", f"a {words}", 5), code)


def slow_reader(server: Watched, rng: random.Random) -> None:
    with server.begin("/inference", body("/inference", tokens=100, stream=True), receive_buffer=2048) as sock:
        time.sleep(rng.random())
        data = b"".join(iter(lambda: sock.recv(512), b""))
    server.ledger.note("POST", "/inference", int(data[9:12]))
    assert b"[DONE]" in data


def scrape(server: Watched, rng: random.Random) -> None:
    for path in ("/metrics", "/stats", "/health", "/slots"):
        assert server.ask(path, method="GET").status == 200


def dashboard(server: Watched, rng: random.Random) -> None:
    with server.connect() as sock:
        sock.sendall(b"GET /events?detail=1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(rng.randint(1, 5)):
            sock.recv(4096)


MIX: dict[Act, int] = {
    short: 30, golden: 10, long: 6, stream: 10, cut_stream: 6, crash: 6, impatient: 3, bad: 12, too_large: 2,
    poison: 3, slow_reader: 3, scrape: 6, dashboard: 3,
}  # fmt: skip


def roam(server: Watched, seed: int, until: float, done: Counter[str], taken: list[tuple[float, float]]) -> None:
    """Be one client after the other until the time is over; note when each short request began and what it took."""
    rng = random.Random(seed)
    while (began := time.monotonic()) < until:
        act = rng.choices(list(MIX), list(MIX.values()))[0]
        act(server, rng)
        done[act.__name__] += 1
        if act is short:
            taken.append((began, time.monotonic() - began))


def watch(server: Watched, begin: float, until: float) -> list[Pulse]:
    """Return the pulse once a second from `begin` to `until`."""
    pulses = []
    pause = threading.Event()
    while time.monotonic() < until:
        pause.wait(1)
        if time.monotonic() >= begin:
            pulses.append(server.pulse())
    return pulses


def test_after_minutes_of_everything_nothing_is_left_behind(fleet: Fleet, request: pytest.FixtureRequest) -> None:
    left = 60 * request.config.getoption("--soak-minutes")
    server = fleet.server(request.config.getoption("--soak-policy"), SOAKED)
    soak(server, min(left, STRETCH))
    while (left := left - STRETCH) > 0:
        with server.watched(killed=True, tracebacks=True):
            reloads(1)(server)
        server.warm_up()
        soak(server, min(left, STRETCH))
    assert_only_armed_faults(server.output())


def soak(server: Watched, seconds: float) -> None:
    """Let all clients come for so long; then the process must be as it was, as quick as at first, and its books right."""
    begin = time.monotonic()
    until = begin + seconds
    done: Counter[str] = Counter()
    taken: list[tuple[float, float]] = []
    with server.watched(tracebacks=True, growth=GROWTH), contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(in_background(lambda n=n: roam(server, n, until, done, taken) or "well"))
            for n in range(CLIENTS)
        ]
        pulses = watch(server, begin + STARTUP * seconds, until)
        wait_until(lambda: all(clients), 90)
    assert [client[0] for client in clients] == ["well"] * CLIENTS
    middle = len(pulses) // 2
    early, late = (min(p.rss for p in part) for part in (pulses[:middle], pulses[middle:]))
    first, last = (p99(taken, begin + share * seconds, seconds / 4) for share in (0, 0.75))
    print(f"{server.policy}: {sum(done.values())} acts {dict(done)}, {early >> 20} then {late >> 20} MB, "
          f"p99 {1e3 * first:.0f} then {1e3 * last:.0f} ms")  # fmt: skip
    assert late - early < WITHIN, [p.rss >> 20 for p in pulses]
    assert last <= SLOWER * first or len(taken) < 4 * ENOUGH, (first, last)


def p99(taken: list[tuple[float, float]], begin: float, seconds: float) -> float:
    """Return the time that one in a hundred short requests of this while exceeded."""
    times = sorted(each for at, each in taken if begin <= at < begin + seconds)
    return times[int(0.99 * len(times))] if times else 0.0


def assert_only_armed_faults(text: str) -> None:
    """Hold each traceback in the log to be one of an armed fault."""
    for each in text.split("Traceback (most recent call last):")[1:]:
        last = next(line for line in each.splitlines() if line and not line.startswith((" ", "{")))
        assert "armed fault" in last or "not finite" in last, each[:2000]
