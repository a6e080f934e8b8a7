"""What a mix of hostile bodies costs 16 streams: their time for a token, and the server's memory.

    python -m benchmarks.abuse --minutes 5 --json benchmarks/results/abuse.json
    python -m benchmarks.abuse --minutes 0.5 --quiet 20 --batches --json benchmarks/results/abuse-batches.json

A real server answers 16 clients that stream, each the next answer as soon as it has one. First they are alone, then
another process sends 20 hostile bodies a second for some minutes, then they are alone again. A token's time is the time
between two events of a stream, except for the wait for its first. Wanted: with the bodies the p99 of that is at most
twice the p99 before, and afterwards the server has at most 50 MB more. With --batches, files of hostile lines take the
place of the bodies, one batch after the other.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import selectors
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks import closed_loop, report
from benchmarks.bodies import KINDS, LIMIT
from benchmarks.server import Served, call, served

STREAMS, TOKENS = 16, 400
RATE = 20  # hostile bodies a second
SENDERS = 64  # that may wait for an answer at once
PATIENCE = 60.0  # seconds for an answer
P99_BOUND, MEMORY_BOUND = 2.0, 50.0  # times, and MB
EVENT, END = b"data: ", b"\r\n0\r\n\r\n"
BODIES = {
    "/inference": '{"prompt":"x","num_tokens":1%s}',
    "/v1/completions": '{"prompt":"x","max_tokens":1%s}',
    "/generate": '{"inputs":"x","parameters":{"max_new_tokens":1%s}}',
    "/v1/chat/completions": '{"max_tokens":1%s}',
    "/tokenize": "{%s}",
    "/detokenize": "{%s}",
}
console = Console(stderr=True, width=80)


class Hostile(NamedTuple):
    """A body that no client needs, and where it goes."""

    name: str
    path: str
    body: bytes


class Timed(NamedTuple):
    """How one hostile body was answered: its status is 0 where the connection broke."""

    name: str
    status: int
    seconds: float


def hostile() -> list[Hostile]:
    """Return what is sent in turns."""
    many_keys, ones = KINDS["a key twice among 20,000"], KINDS["ones that fill the body"]
    text = '"' + "Now is the winter of our discontent. " * 25_000 + '"'
    extras: list[tuple[str, str, str]] = [
        *(("a key twice among 20,000", path, f',"k":{many_keys(LIMIT - 99)}')
          for path in ("/inference", "/v1/completions", "/generate")),
        *((f"stop: {n} ones", path, f',"stop":[{",".join(["1"] * (n - 1))},1]')
          for n in (12_000, 500_000) for path in ("/inference", "/v1/completions", "/generate")),
        *(("a wrong number", path, f',"temperature":-{n}')
          for n, path in enumerate(("/inference", "/v1/completions", "/generate"), 1)),
        ("a text of 0.9 MB", "/tokenize", f'"prompt":{text}'),
        ("a text of 0.9 MB", "/tokenize", f'"inputs":{text}'),
        ("logit_bias: many keys", "/v1/completions", f',"logit_bias":{KINDS["many keys"](LIMIT - 99)}'),
        ("logit_bias: ones", "/v1/completions", f',"logit_bias":{ones(LIMIT - 99)}'),
        ("messages: ones", "/v1/chat/completions", f',"messages":{ones(LIMIT - 99)}'),
        ("messages: objects", "/v1/chat/completions", f',"messages":{KINDS["many objects"](LIMIT - 99)}'),
        ("tokens: ones", "/detokenize", f'"tokens":{ones(LIMIT - 99)}'),
        ("tokens: 65,000 ids", "/detokenize", f'"tokens":{KINDS["65,000 ids"](LIMIT - 99)}'),
    ]  # fmt: skip
    return [Hostile(name, path, (BODIES[path] % extra).encode()) for name, path, extra in extras]


def abuse(port: int, rate: float, seconds: float, begins: Any, reports: Any) -> None:
    """Send the bodies in a random order at a steady rate, each with an id of its own; tell how each was answered."""
    bodies = hostile()
    begins.set()
    rng = random.Random(1)
    turns = itertools.chain.from_iterable(rng.sample(bodies, len(bodies)) for _ in itertools.count())
    began = time.perf_counter()
    with ThreadPoolExecutor(SENDERS) as pool:
        answers = []
        for number in range(int(rate * seconds)):
            time.sleep(max(0.0, began + number / rate - time.perf_counter()))
            answers.append(pool.submit(send, port, next(turns), f"abuse-{number}"))
    reports.put([answer.result() for answer in answers])


def hostile_lines() -> dict[str, bytes]:
    """Return files of batches that no client needs."""
    size = 32 << 20
    empty = (
        b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":[' + b"[]," * (size // 3) + b"[]]}}"
    )
    kilobyte = b'{"custom_id":"a","url":"/v1/completions","body":{"prompt":[' + b"[]," * 300 + b"[]]}}\n"
    return {
        "a line of empty lists": empty, "a line of one text": b'{"custom_id":"' + b"x" * size + b'"}',
        "a million lines of {}": b"{}\n" * 1_000_000, "blank lines": b"\n" * size,
        "45,000 lines of lists": kilobyte * 45_000,
    }  # fmt: skip


def abuse_with_batches(port: int, rate: float, seconds: float, begins: Any, reports: Any) -> None:
    """Send hostile files for some seconds, and wait for the end of the batch of each; tell how it ended."""
    files, end = hostile_lines(), time.perf_counter() + seconds
    begins.set()
    ended: list[Timed] = []
    for name, data in itertools.cycle(files.items()):
        began = time.perf_counter()
        if began > end:
            break
        uploaded = call(port, "POST", "/v1/files", files={"file": ("x.jsonl", data)}, data={"purpose": "batch"})
        batch = {"input_file_id": uploaded["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        id = call(port, "POST", "/v1/batches", batch)["id"]
        while (state := call(port, "GET", f"/v1/batches/{id}"))["status"] not in ("failed", "completed"):
            time.sleep(0.1)
        ended.append(Timed(name, 200 if state["status"] == "completed" else 400, time.perf_counter() - began))
        call(port, "DELETE", f"/v1/files/{uploaded['id']}")
    reports.put(ended)


def send(port: int, body: Hostile, id: str) -> Timed:
    """Send a body on a connection of its own, and read the answer to its end."""
    message = closed_loop.request(body.path, body.body, f"Connection: close\r\nX-Request-Id: {id}\r\n")
    began, head = time.perf_counter(), b""
    try:
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as sock:
            sock.sendall(message)
            head = sock.recv(1 << 16)
            while sock.recv(1 << 16):
                pass
    except OSError:  # what has come of the answer says how it ended
        pass
    status = int(head[9:12]) if len(head) > 12 else 0
    return Timed(body.name, status, time.perf_counter() - began)


class Streams:
    """Clients in one thread, each of which reads a stream to its end and then begins the next."""

    def __init__(self, port: int, count: int) -> None:
        body = {"prompt": "ROMEO:", "num_tokens": TOKENS, "stream": True}
        self._message = closed_loop.request("/inference", json.dumps(body).encode())
        self._last: dict[socket.socket, float | None] = {}  # when the last event came
        self._tails: dict[socket.socket, bytes] = {}
        self._gaps: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(port, count), daemon=True)
        self._failure: str | None = None

    def __enter__(self) -> Streams:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join(10)

    def measure(self, seconds: float, until_done: Callable[[], bool] = lambda: True) -> list[float]:
        """Return the sorted times of tokens for at least this many seconds."""
        self._gaps = []
        began = time.perf_counter()
        while time.perf_counter() - began < seconds or not until_done():
            if self._failure is not None:
                raise SystemExit(f"error: {self._failure}. See what the server says")
            time.sleep(0.1)
        gaps, self._gaps = self._gaps, []
        return sorted(gaps)

    def _run(self, port: int, count: int) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for _ in range(count):
                    sock = socket.create_connection(("127.0.0.1", port), 30)
                    selector.register(sock, selectors.EVENT_READ)
                    self._begin(sock)
                while not self._over.is_set():
                    for key, _ in selector.select(0.2):
                        assert isinstance(key.fileobj, socket.socket)
                        self._read(key.fileobj)
                for sock in self._last:
                    sock.close()
        except (OSError, RuntimeError) as error:
            self._failure = f"a stream broke: {error}"

    def _begin(self, sock: socket.socket) -> None:
        self._last[sock], self._tails[sock] = None, b""
        sock.sendall(self._message)

    def _read(self, sock: socket.socket) -> None:
        data = sock.recv(1 << 16)
        now, last = time.perf_counter(), self._last[sock]
        if not data:
            raise RuntimeError("the server closed its connection")
        tail = self._tails[sock] + data
        self._tails[sock] = tail[-len(END) :]
        if b'"error"' in data:
            raise RuntimeError(f"it got {data[:200]!r}")
        if EVENT in data:
            if last is not None:
                self._gaps.append(now - last)
            self._last[sock] = now
        if tail.endswith(END):
            self._begin(sock)


def figures(gaps: list[float], memory: float) -> dict[str, float]:
    """Return the percentiles of tokens' times in ms, and the server's memory in MB."""
    return {"events": len(gaps), **report.percentiles(gaps), "longest_ms": 1e3 * gaps[-1], "memory_mb": memory}


def measure(server: Served, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the three parts, and what became of the hostile bodies."""
    context = multiprocessing.get_context("spawn")
    begins, reports = context.Event(), context.SimpleQueue()
    seconds = 60 * args.minutes
    target = abuse_with_batches if args.batches else abuse
    sender = context.Process(target=target, args=(server.port, args.rate, seconds, begins, reports), daemon=True)
    with Streams(server.port, args.streams) as streams:
        for body in () if args.batches else hostile():  # the first of each kind loads what it needs
            send(server.port, body, "warm")
        streams.measure(args.quiet / 4)
        before = figures(streams.measure(args.quiet), server.memory)
        sender.start()
        begins.wait(PATIENCE)
        during = figures(streams.measure(seconds, lambda: not reports.empty() or not sender.is_alive()), server.memory)
        if reports.empty():
            raise SystemExit("error: the process that sends the bodies ended early. See above")
        answers: list[Timed] = reports.get()
        sender.join()
        streams.measure(args.quiet / 4)
        after = figures(streams.measure(args.quiet), server.memory)
    return {
        "before": before, "during": during, "after": after, "bodies": kinds_of(answers),
        "p99_ratio": during["p99_ms"] / before["p99_ms"], "p99_bound": P99_BOUND,
        "grown_mb": after["memory_mb"] - before["memory_mb"], "grown_bound_mb": MEMORY_BOUND,
    }  # fmt: skip


def kinds_of(answers: list[Timed]) -> dict[str, dict[str, Any]]:
    """Return for each kind of body how often it was answered how, and how long that took at most."""
    by_name: dict[str, list[Timed]] = defaultdict(list)
    for answer in answers:
        by_name[answer.name].append(answer)
    return {
        name: {
            "sent": len(own), "statuses": dict(sorted(Counter(a.status for a in own).items())),
            "p50_ms": 1e3 * statistics.median(a.seconds for a in own),
            "longest_ms": 1e3 * max(a.seconds for a in own),
        }
        for name, own in by_name.items()
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """Print the result for a person."""
    rows = []
    for part, name in (("before", "alone"), ("during", "abused"), ("after", "alone again")):
        own = result[part]
        times = (own[key] for key in ("p50_ms", "p99_ms", "longest_ms"))
        rows.append([name, *(f"{ms:.1f}" for ms in times), f"{own['memory_mb']:.0f}"])
    heads = ("streams", "token p50", "p99", "longest, ms", "memory, MB")
    beside = "files of hostile lines" if result["batches"] else f"{result['rate']:g} bodies a second"
    report.show(f"{result['streams']} streams and {beside}", heads, rows)
    rows = []
    for name, own in result["bodies"].items():
        statuses = ", ".join(f"{status or 'broken'}: {n}" for status, n in own["statuses"].items())
        rows.append([name, str(own["sent"]), statuses, f"{own['p50_ms']:.0f}", f"{own['longest_ms']:.0f}"])
    report.show(None, ("body", "sent", "answers", "p50, ms", "longest, ms"), rows, words=["answers"])
    met = {True: "met", False: "not met"}
    console.print(
        f"p99 of a token: {result['p99_ratio']:.2f} times as long; wanted at most {P99_BOUND:g}: "
        f"{met[result['p99_ratio'] <= P99_BOUND]}\n"
        f"memory: {result['grown_mb']:+.0f} MB; wanted at most {MEMORY_BOUND:+.0f}: "
        f"{met[result['grown_mb'] <= MEMORY_BOUND]}"
    )


def main() -> None:
    parser = report.parser("abuse", __doc__)
    report.add_server(parser, threads=1)
    parser.add_argument("--streams", type=int, default=STREAMS, help=f"clients ({STREAMS})")
    parser.add_argument("--rate", type=float, default=RATE, help=f"bodies a second ({RATE})")
    parser.add_argument("--minutes", type=float, default=5.0, help="of abuse (5)")
    parser.add_argument("--batches", action="store_true", help="send files of hostile lines instead of bodies")
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds before and after (60)")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        served(args, "--access-log", "off", "--batch-folder", folder) as server,
    ):
        result = measure(server, args)
    facts = {name: vars(args)[name] for name in ("model", "policy", "streams", "rate", "minutes", "batches")}
    result |= facts
    show(result)
    report.finish("abuse", result, args.json)


if __name__ == "__main__":
    main()
