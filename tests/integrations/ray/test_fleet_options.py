"""The command line of a fleet, and what each replica's server gets."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from integrations.queue.door import bind
from integrations.ray import options, serve
from routing.autoscalers import Bounds
from terminal.options import UsageError
from tests.support import ROOT, wait_until
from tests.support.servers import clean_environment


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("EB_")]:
        monkeypatch.delenv(name)


def test_a_fleets_flags_and_those_of_its_servers_mix() -> None:
    plan = options.parse(["dynamic", "--replicas=2..8", "--model", "bard", "--router", "least-loaded", "--port", "1"])
    assert (plan.replicas, plan.router, plan.config.port) == (Bounds(2, 8), "least-loaded", 1)
    assert (plan.environment["EB_MODEL"], plan.environment["EB_POLICY"]) == ("bard", "dynamic")


def test_the_servers_get_the_loop_of_the_policy_and_its_options() -> None:
    words = ["chunked+priority", "--policy-option", "aging=5,max_batched_tokens=64"]
    environment = options.parse(words).environment
    assert (environment["EB_POLICY"], environment["EB_POLICY_OPTION"]) == ("chunked", "max_batched_tokens=64")


def test_the_queue_has_the_limits_of_its_servers_together() -> None:
    plan = options.parse(["dynamic", "--replicas", "1..3", "--receive-timeout", "2", "--max-connections", "2000"])
    assert (plan.limits.receive, plan.limits.send, plan.limits.connections) == (2.0, 30.0, 6000)


def test_the_address_of_the_queue_is_that_of_a_url() -> None:
    plan = options.parse(["dynamic", "--host", "[::]", "--port", "8702"])
    assert (plan.config.host, plan.config.address) == ("::", "[::]:8702")
    with bind(plan.config.host, 0) as sock:
        sock.listen()
        socket.create_connection(("127.0.0.1", sock.getsockname()[1])).close()  # IPv4 as well


def test_an_address_of_another_machine_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.main(["dynamic", "--model", "mock:llm-mock", "--host", "192.0.2.1"])
    assert "192.0.2.1:8500" in capsys.readouterr().err


def test_a_folder_from_which_ray_cannot_start_its_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/my projects/.venv/bin/python")
    with pytest.raises(SystemExit):
        serve.main(["dynamic", "--model", "mock:llm-mock"])
    assert "'/my projects/.venv/bin/python'" in capsys.readouterr().err


def test_replicas_on_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "cores", lambda: 8)
    threads = [
        options.parse(["dynamic", *more]).environment["EB_COMPUTE_THREADS"]
        for more in (["--replicas", "4"], ["--replicas", "1..16"], ["--compute-threads", "3"], ["--address", "auto"])
    ]
    assert threads == ["2", "1", "3", "0"]


def test_the_queue_writes_the_access_log_and_no_replica() -> None:
    plan = options.parse(["dynamic", "--access-log", "on"])
    assert (plan.config.access_log, plan.environment["EB_ACCESS_LOG"]) == (True, "off")


@pytest.mark.parametrize(
    "words",
    [
        ["--replicas", "0"], ["--replicas", "4..2"], ["--replicas", "two"], ["--replicas"], ["--router", "best"],
        ["--autoscaler", "tokens:7"], ["--cpus", "-1"], ["--doctor"], ["--replica", "2"], ["--model"],
        ["--host", "[zz]"], ["--host", "http://x"],
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError):
        options.parse(["dynamic", *words])


STARTER = """
import os, sys
from integrations.ray import server_process
server_process.APP = sys.argv[1]
server = server_process.ServerProcess({})
print(server._process.pid, flush=True)
sys.stdin.read(1)
server.drain(20) if sys.argv[2] == "drain" else os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("end", ["drain", "kill"])
def test_a_server_never_outlives_the_process_that_started_it(end: str, tmp_path: Path) -> None:
    """The pipe between them closes in both cases, also when nothing can clean up any more."""
    server = tmp_path / "server.py"
    server.write_text("import time; time.sleep(60)")
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(server), end],
        cwd=ROOT, env=clean_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with starter:
        assert starter.stdin is not None
        assert starter.stdout is not None
        session = int(starter.stdout.readline())
        wait_until(lambda: any("server.py" in command for command in commands_of(session)))
        starter.stdin.write(b"x")
        starter.stdin.flush()
        wait_until(lambda: not commands_of(session))


def commands_of(session: int) -> list[str]:
    """Return the command lines of the processes of a session that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, own = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(own) == session and state != "Z":
                found.append((folder / "cmdline").read_text())
    return found
