"""The servers of a comparison, each started on a free port and stopped by its own pid.

This module starts `app.py` beside this folder as a user would, and knows nothing else about it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import requests

from terminal.options import UsageError

from .target import ServerUnreachable, Target

APP = Path(__file__).resolve().parents[2] / "app.py"
READY_SECONDS = 300.0
STOP_SECONDS = 30.0
LOG_LINES = 3


class ServerFailed(ServerUnreachable):
    """A started server did not become ready; the message is the end of its log."""


def free_port() -> int:
    """Return a loopback port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that no server outlives this process."""
    is_main = threading.current_thread() is threading.main_thread()  # no other may

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    usual = {one: signal.signal(one, leave) for one in (signal.SIGTERM, signal.SIGHUP) if is_main}
    try:
        yield
    finally:
        for one, handler in usual.items():
            signal.signal(one, handler)


def check(commands: Iterable[Sequence[str]]) -> None:
    """Raise UsageError if a server cannot be started with one of these policies and flags, without starting any."""
    for command in commands:
        done = subprocess.run(
            _program(*command, "--print-config"), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, env=_environment(), text=True, errors="replace",
        )  # fmt: skip
        if done.returncode:
            raise UsageError(_reason(done.stderr) or f"./server.sh {command[0]} cannot start. Run it to see why")


def _program(*arguments: str) -> list[str]:
    """Return the command of a server; flags that follow its policy win. UsageError if the server is not installed here."""
    if not APP.is_file():
        raise UsageError("this client was installed without the server. Use NAME=http://HOST:PORT instead of a policy")
    policy, dashes, flags = arguments[0].partition(" --")
    return [sys.executable, str(APP), policy, *arguments[1:], *shlex.split(dashes + flags)]


def _environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name != "BATCHING"}


def _reason(log: str) -> str:
    """Return the errors in the log of a server, or its last lines."""
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines[-LOG_LINES:]
    return " ".join(errors)


@contextlib.contextmanager
def started(policy: str, arguments: Sequence[str], log: Path, key: str | None = None) -> Iterator[tuple[str, int]]:
    """Run a server with a policy; yield its URL and pid when it is ready, and stop it after the block.

    Raise UsageError if the server is not installed here, ServerFailed if it does not become ready.
    """
    port = free_port()
    command = _program(policy, "--host", "127.0.0.1", "--port", str(port), *arguments)
    # Not an argument: every user of the machine can read those.
    environment = _environment() | ({"EB_API_KEY": key} if key else {})
    with log.open("w") as file:
        # In a new session, so that Ctrl-C reaches only the client, which lets requests finish.
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=file, env=environment, start_new_session=True
        )
    with signals_raise():
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            stop(process)


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float = READY_SECONDS) -> None:
    """Wait until the server is ready; raise ServerFailed if it exits or takes too long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(requests.RequestException), Target(url).session() as session:
            if session.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise ServerFailed(_reason(log.read_text("utf-8", "replace")) or f"the server was not ready after {seconds:.0f} s")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate a started server, and kill it if it does not exit."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
