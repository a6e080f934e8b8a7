"""The client as a process: how it starts, what Ctrl-C does, and its progress."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from client import runs
from client.data import Planned
from client.display import Display
from client.send import load
from client.send.target import Target
from tests.support import ROOT, points, wait_until
from tests.support.mock_server import MockServer


def started(command: list[str], folder: Path, server: MockServer, **environ: str) -> subprocess.Popen[str]:
    flags = ["--port", str(server.port)]
    kept = {name: value for name, value in os.environ.items() if name not in ("IP", "PYTHONPATH")}
    return subprocess.Popen(
        [sys.executable, *command, *flags], cwd=folder, env={**kept, **environ},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the client, the two rooms that it needs, and what Python has compiled of them."""
    root = tmp_path_factory.mktemp("alone")
    for room in ("client", "terminal", "batch_files"):
        shutil.copytree(ROOT / room, root / room)
    (root / "client" / ".env").write_text("IP=127.0.0.1\n")
    return root


@pytest.mark.parametrize(
    ("command", "folder"),
    points(2, (["client.py"], "client"), (["-m", "client.client"], "."), (["client/client.py"], ".")),
)
def test_it_starts_all_three_ways_without_the_server(
    command: list[str], folder: str, server: MockServer, alone: Path
) -> None:
    process = started([*command, "--burst", "--numsamples", "3"], alone / folder, server)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["completed"] == 3
    assert "IP is not set" not in err


@pytest.mark.parametrize("program", points(1, "compare", "sweep", "top", "batch", "chat", "graph"))
def test_each_program_starts_without_the_server(program: str, alone: Path) -> None:
    command = [sys.executable, "-m", f"client.{program}", "--help"]
    result = subprocess.run(command, cwd=alone, capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("script", points(2, "app.py", "client/client.py", "client/graph.py"))
def test_a_python_without_packages_gets_one_line_with_the_remedy(script: str) -> None:
    command = [sys.executable, "-S", script, "--help"]  # without the packages that are installed
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "pip install -r" in result.stderr


def test_ctrl_c_stops_sending_and_sums_up_what_finished(server: MockServer) -> None:
    command = ["client/client.py", "--rate", "20", "--numsamples", "5000"]
    process = started(command, ROOT, server, IP="127.0.0.1")
    wait_until(lambda: server.asked)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    result = json.loads(out.splitlines()[-1])
    assert process.returncode == 1
    assert result["completed"] >= 1
    assert result["failed"] == 0
    assert result["unsent"] == 5000 - result["completed"]
    assert "were not sent: the run was stopped" in err
    assert "Traceback" not in err


@pytest.mark.process
def test_a_second_ctrl_c_leaves_at_once(server: MockServer) -> None:
    server.ttft = 60
    process = started(["client/client.py", "--burst"], ROOT, server, IP="127.0.0.1")
    wait_until(lambda: len(server.asked) == 100)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "stopped sending" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130  # and not 1, as after the time that a first Ctrl-C grants
    assert "Traceback" not in err


def test_the_progress_line_says_how_far_the_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    sending = load.LoadRun(Target("http://127.0.0.1"), [Planned(0, 0.0, "a", 1)])
    display = Display(sending, Console(stderr=True), last_send=0.0)
    monkeypatch.setattr(sending, "counts", lambda: load.Counts(100, sent=60, done=48, failed=2, tokens=900, seconds=10))
    assert display.state() == (50, 100, "done 48/100  running 10  failed 2  90 tokens/s  ETA 10 s")


def test_on_a_terminal_a_bar_is_drawn_to_the_end(server: MockServer) -> None:
    with open(os.devnull, "w") as nowhere:
        console = Console(file=nowhere, force_terminal=True, record=True, width=120)
        target = Target(server.url)
        runs.send(target, [Planned(i, 0.0, "a", 1) for i in range(3)], console)
        assert "done 3" in console.export_text()
