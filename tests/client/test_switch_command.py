"""./eb switch: two policies in turns on a server with traffic, and the policy from before is back however it ends."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from client import switch
from client.report.receipt import FEWEST, TAKE_B, TELLING, TOO_FEW, UNKNOWN, Request
from client.send.target import ServerUnreachable, Target
from tests.support import ROOT, in_background, wait_until
from tests.support.servers import Server, clean_environment, kill

pytestmark = pytest.mark.process
JSON = {"Content-Type": "application/json"}
ARMS = ("dynamic", "dynamic+sjf")
PREDICTED = 2 * switch.SIMULATION  # seconds: a simulation has the lowest priority, and the command waits so long for it


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server of the policy static, to which two clients send requests all the time."""
    over = threading.Event()
    flags = ["--model", "mock:llm-mock@50", "--max-batch-size", "4"]

    def send(user: str, server: Server) -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                body = json.dumps({"prompt": "hi", "max_tokens": 8, "user": user}).encode()
                assert server.send("POST", "/v1/completions", body, **JSON).status == 200

    with Server(tmp_path_factory.mktemp("switch") / "log", "static", *flags) as server:
        threads = [threading.Thread(target=send, args=(user, server)) for user in ("ann", "ben")]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.get("/served").json["next"] > 100)  # enough for a prediction
        yield server
        over.set()
        for thread in threads:
            thread.join()


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    yield shared
    shared.send("DELETE", "/policy/lease")
    assert serving(shared) == "static"


def serving(server: Server) -> str:
    return str(server.get("/policy").json["policy"])


def command(server: Server, *more: str) -> list[str]:
    return [f"127.0.0.1:{server.port}", *ARMS, "--yes", "--window", "1", *more]


@contextlib.contextmanager
def started(server: Server, *more: str) -> Iterator[subprocess.Popen[str]]:
    """Yield the command in a process of its own, as soon as it knows that one of its policies serves."""
    since = len(server.output())
    process = subprocess.Popen(
        [sys.executable, "-m", "client.switch", *command(server, *more)], cwd=ROOT, env=clean_environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_until(lambda: process.poll() is not None or has_lease(server, since), PREDICTED)
        yield process
    finally:
        kill(process)
        process.communicate()  # closes its pipes


def has_lease(server: Server, since: int) -> bool:
    """Whether a command has switched, and has looked again with the lease that it got by this."""
    said = server.output()[since:]
    return '"route":"/served"' in said.partition('"method":"PUT","route":"/policy","status":200')[2]


def test_an_experiment_ends_with_a_receipt(server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    more = ["--goodput", "ttft:60000", "e2el:60000", "--report", str(tmp_path / "receipt.html")]
    assert switch.main(command(server, "--minutes", "0.24", *more)) == 0  # seven pairs
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert found["arms"] == {"A": "dynamic", "B": "dynamic+sjf"}
    assert (found["planned"], found["ended"]) == (TELLING, "")
    # On a busy machine, requests of one window are still there in the next, and the end comes after three pairs.
    assert found["done"] == TELLING or (found["verdict"], found["done"]) == (UNKNOWN, FEWEST)
    assert (found["pairs"] == TELLING) == (found["verdict"] not in (UNKNOWN, TOO_FEW))
    assert found["options"].keys() == {"A", "B"}
    assert "predictor" in found["options"]["B"]
    goodput = found["figures"]["goodput"]
    if found["pairs"]:
        assert len(found["clients"]) == 2
        assert found["requests"] > 8
        assert (goodput["a"], goodput["b"], goodput["change"]) == (1, 1, 0)
    if not re.search("no prediction: .*within", err):  # a simulation has the lowest priority
        assert goodput["predicted"]["change"] == 0
        assert "predicted change of E2E mean from dynamic to dynamic+sjf" in err
    assert "will serve all its clients with dynamic (A) and dynamic+sjf (B) in turns of 1 s" in err
    assert "Then static serves again" in err
    assert serving(server) == "static"
    page = (tmp_path / "receipt.html").read_text("utf-8")
    for text in ("TTFT mean", "goodput", f"{found['requests']:,} requests", f"{found['verdict']} (A dynamic"):
        assert text in page.replace("&#x27;", "'")


def test_ctrl_c_gives_the_policy_back_and_shows_what_is_known(server: Server) -> None:
    with started(server) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
        assert serving(server) == "static"
    assert process.returncode == 1
    assert json.loads(out)["ended"] == "stopped by Ctrl-C"
    assert "ended early: stopped by Ctrl-C" in err


def test_a_killed_command_leaves_its_policy_behind_only_until_the_lease_ends(server: Server) -> None:
    with started(server) as process:
        kill(process)
    wait_until(lambda: serving(server) == "static")


def test_ctrl_c_while_the_switch_itself_is_asked_for_leaves_only_a_lease(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command then has no lease that it could end, though the server has begun one."""
    whole = Target.ask

    def ask(self: Target, method: str, *asked: Any) -> Any:
        answer = whole(self, method, *asked)
        if method == "PUT":
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(Target, "ask", ask)
    monkeypatch.setattr(switch, "SLACK", 2.0)
    assert switch.main(command(server)) == 1
    assert json.loads(capfd.readouterr().out)["ended"] == "stopped by Ctrl-C"
    wait_until(lambda: serving(server) == "static")


def test_a_lost_connection_ends_it_and_the_lease_ends_by_itself(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, lost = Target.ask, threading.Event()

    def ask(self: Target, *asked: Any) -> Any:
        if lost.is_set():
            raise ServerUnreachable("the cable is gone")
        return whole(self, *asked)

    monkeypatch.setattr(Target, "ask", ask)
    with in_background(lambda: switch.main(command(server))) as codes:
        wait_until(lambda: serving(server) in ARMS, PREDICTED)
        lost.set()
        wait_until(lambda: codes)
    assert codes == [1]
    assert json.loads(capfd.readouterr().out)["ended"] == "the cable is gone"
    wait_until(lambda: serving(server) == "static")


def test_who_ends_the_lease_ends_the_experiment(server: Server) -> None:
    with started(server) as process:
        assert server.send("PUT", "/policy", json.dumps({"policy": "nobatch"}).encode(), **JSON).status == 409
        assert server.send("DELETE", "/policy/lease?lease=another").json["policy"] in ARMS
        assert server.send("DELETE", "/policy/lease").json["policy"] == "static"
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "lease" in json.loads(out)["ended"]
    assert serving(server) == "static"


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_it_never_begins_without_a_word(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = [word for word in command(server) if word != "--yes"]

    def too_slow(self: switch.Switch) -> None:
        raise ServerUnreachable("timed out")

    monkeypatch.setattr(switch.Switch, "predict", too_slow)
    monkeypatch.setattr(sys, "stdin", StringIO("y\n"))
    assert switch.main(asked) == 2
    err = capfd.readouterr().err
    assert "Use --yes to begin" in err
    assert "no prediction: no answer within 90 s" in err
    for answer in ("\n", "n\n", ""):  # also Ctrl-D
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        assert switch.main(asked) == 0
    assert server.get("/policy").json["policy"] == "static"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dynamic", "nosuch"], "unknown policy 'nosuch'"),
        (["dynamic", "dynamic+nosuch"], "unknown order 'nosuch'"),
        (
            ["dynamic", "nobatch", "--window", "10", "--minutes", "2"],
            "have 6 pairs of windows of 10 s, and 7 are the fewest",
        ),
        (["dynamic", "nobatch", "leased"], "another client has leased the policy"),
    ],
)
def test_what_cannot_begin_is_refused_before_it_is_announced(
    server: Server, words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if words[-1] == "leased":
        words = words[:-1]
        server.send("PUT", "/policy", json.dumps({"policy": "nobatch", "for_s": 600.0}).encode(), **JSON)
    assert switch.main([f"127.0.0.1:{server.port}", *words, "--yes"]) == 2
    out, err = capfd.readouterr()
    assert message in err
    assert "will serve all its clients" not in out + err


@pytest.mark.parametrize("answer", [{}, [], {"status": "ok"}, 3, None])
def test_another_server_is_named_as_such(
    answer: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reply = SimpleNamespace(status_code=200, json=lambda: answer)
    monkeypatch.setattr(Target, "ask", lambda *asked: reply)
    assert switch.main(["127.0.0.1:1", *ARMS, "--yes"]) == 2
    assert "has another answer (HTTP 200) than a server of ours" in capfd.readouterr().err


def test_a_report_that_cannot_be_written_loses_no_receipt(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from tests.client.test_receipt import NAMES, of, steady

    (tmp_path / "folder").mkdir()

    def measure(*asked: Any) -> dict[str, Any]:
        (tmp_path / "folder").rmdir()
        return of(steady(0.8)) | NAMES

    monkeypatch.setattr(switch.Switch, "measure", measure)
    assert switch.main(command(server, "--report", str(tmp_path / "folder" / "receipt.html"))) == 2
    out, err = capfd.readouterr()
    assert json.loads(out)["verdict"] == TAKE_B
    assert "cannot write" in err


@pytest.mark.parametrize("words", [[], ["dynamic"], ["dynamic", "dynamic"], ["a", "b", "c"], ["dynamic", ""]])
def test_two_policies_must_be_named(words: Sequence[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert switch.main([*words, "--yes"]) == 2
    assert "name two policies" in capfd.readouterr().err


class Scripted(switch.Switch):
    """Asks a server that answers as it is told: `rows` a look, by `policy`."""

    def __init__(self, answers: Any) -> None:
        super().__init__(Target("http://127.0.0.1:1"), dict(zip("AB", ARMS)))
        self.answers, self.asked = answers, []

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        self.asked.append((method, path, body))
        return dict(self.answers(method, path, body))


def served(policy: str, now: float = 0.0, **more: Any) -> dict[str, Any]:
    return {
        "now": now,
        "next": 0,
        "lost": 0,
        "ended": [],
        "open": [],
        "policy": policy,
        "last_failure": None,
        "leased": False,
        **more,
    }


def lent(policy: str, now: float = 0.0) -> dict[str, Any]:
    return {"policy": policy, "lease": "x", "now": now, "options": {}}


@pytest.mark.parametrize("is_old", [False, True])
def test_a_policy_that_fails_ends_it_and_is_named(is_old: bool) -> None:
    """If it failed before, it is not blamed for the end of the lease."""
    old = [{"policy": name, "error": "ValueError: 1", "now": "static", "time": 1.0} for name in ARMS]
    arms: list[str] = []

    def answer(method: str, path: str, body: Any) -> Any:
        if method == "PUT":
            arms.append(body["policy"])
            return lent(body["policy"])
        new = {"policy": arms[-1], "error": "KeyError: 3", "now": "static", "time": 2.0} if arms else {}
        last = [one for one in old if not arms or one["policy"] == arms[-1]][-1]
        return served("static", last_failure=last if is_old or not arms else new)

    scripted = Scripted(answer)
    if is_old:
        scripted.arms = {"A": ARMS[1], "B": ARMS[1]}  # that which failed last
    found = scripted.measure(3, 0.01, None, Console(quiet=True))
    if is_old:
        assert found["ended"] == "the lease was ended, and static serves again"
        return
    assert found["ended"] == f"{arms[-1]} failed (KeyError: 3), and static serves again"
    assert scripted.asked[-1][:2] == ("DELETE", "/policy/lease?lease=x")
    method, path, shown = scripted.asked[-2]
    assert (method, path, shown["lease"]) == ("POST", "/policy/receipt", "x")
    assert "static serves again. too few pairs to tell" in shown["lines"][-1][0]


def test_a_server_that_started_again_ends_it() -> None:
    scripted = Scripted(lambda *asked: served("static", next=5))
    scripted.look()
    scripted.answers = lambda *asked: served("static", next=1)
    with pytest.raises(switch.Ended, match="started again"):
        scripted.look()


def test_what_the_server_no_longer_keeps_ends_it() -> None:
    """There would be holes in the windows. Before the first of them nothing is lost that counts."""
    row = {"id": "1", "at": 1.0, "first": None, "end": None, "tokens": 0, "client": "", "failed": False}
    scripted = Scripted(lambda *asked: served("static", open=[row]))
    scripted.look()
    assert len(scripted.requests) == 1
    scripted.answers = lambda *asked: served("static", lost=4)
    scripted.look()
    assert scripted.requests == {}  # the end of the one is unknown
    scripted.lease = "x"
    found = scripted.measure(3, 0.01, None, Console(quiet=True))
    assert found["ended"].startswith("4 requests ended between two looks")
    assert (found["done"], found["verdict"]) == (0, TOO_FEW)


def test_without_traffic_it_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    serves = [""]

    def answer(method: str, path: str, body: Any) -> Any:
        if method == "PUT":
            serves[0] = body["policy"]
            return lent(body["policy"], float(next(now)))
        return served(serves[0], float(next(now)))

    console = Console(record=True, file=StringIO())
    found = Scripted(answer).measure(9, 0.01, None, console)
    assert (found["verdict"], found["done"], found["void"]) == (UNKNOWN, FEWEST, {"empty": 2 * FEWEST})
    assert "too little traffic: 0 of 3" in console.export_text()


def test_the_receipt_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    """Even with eight clients: 24 lines of 80 columns."""
    from tests.client.test_receipt import of, steady

    rows = [one._replace(client=f"{i % 8:08x}") for i, one in enumerate(steady(0.9))]
    found = of(rows, before={"E2E mean": {"change": -0.1, "low": -0.15, "high": -0.05}}) | {
        "arms": dict(zip("AB", ARMS)),
        "ended": "",
    }
    console = Console(width=80, record=True, file=StringIO())
    switch.show(console, found)
    text = console.export_text()
    assert len(text.splitlines()) <= 24
    assert max(map(len, text.splitlines())) <= 80
    for word in ("-10 (-15 to -5.0) held", "take B (A dynamic, B dynamic+sjf)", "00000003", "TTFT mean"):
        assert word in text


@pytest.mark.parametrize(("whole", "failed", "told"), [(True, 0, True), (False, 0, False), (True, 3, False)])
def test_refused_requests_are_not_predicted(whole: bool, failed: int, told: bool) -> None:
    lane = {"measured": False, "whole": True, "records": [
        {"t": i + 0.0, "seconds": 1.0, "repeat": 1, "left": [{"id": str(i)}], "members": []} for i in range(20)
    ]}  # fmt: skip
    answer = {
        "lanes": [{"policy": ARMS[0], **lane}, {"policy": ARMS[1], **lane, "whole": whole}],
        "requests": [{"t": i + 0.0, "output_tokens": 1} for i in range(20)],
        "error": {"latency_mean_s": 0.0},
    }
    scripted = Scripted(lambda *asked: answer)
    scripted.serves = ARMS[0]
    scripted.requests = {str(i): Request(str(i), 0.0, None, 1.0, 1, failed=i < failed) for i in range(100)}
    with contextlib.nullcontext() if told else pytest.raises(switch.Ended, match="refused"):
        assert scripted.predict()["E2E mean"]["change"] == 0
    assert scripted.asked[0][2]["policies"] == [ARMS[1]]  # the other one serves, with its options
