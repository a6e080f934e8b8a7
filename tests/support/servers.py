"""Servers in processes of their own, and what to say to them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import ROOT


def unchunked(data: bytes) -> bytes:
    """Return what HTTP chunks hold."""
    whole = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        n = int(size, 16)
        assert data[n : n + 2] == b"\r\n"
        whole, data = whole + data[:n], data[n + 2 :]
    return whole


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on.

    It is below those that the system gives to outgoing connections: one of them may take such a port before a server
    that has just been started does.
    """
    while True:
        port = 15_000 + secrets.randbelow(15_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def clean_environment(**extra: str) -> dict[str, str]:
    """Return this process's environment without anybody's settings, and never asking a hub."""
    own = ("EB_", "TRITON_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(own) and k != "BATCHING"}
    cache = {k: os.environ[k] for k in ("EB_CACHE_DIR",) if k in os.environ}
    return {**kept, **cache, "HF_HUB_OFFLINE": "1", **extra}


def run_app(*argv: str, cwd: Path = ROOT, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run app.py to its end, as server.sh does."""
    return subprocess.run(
        [sys.executable, str(ROOT / "app.py"), *argv],
        capture_output=True, text=True, timeout=180, cwd=cwd, env=clean_environment(**extra),
    )  # fmt: skip


@dataclass
class Answer:
    """A response, whatever its status."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Server:
    """A server in a process of its own; `with` waits until it is ready and stops it by its pid."""

    def __init__(self, log: Path, *argv: str, key: str = "", **extra: str) -> None:
        self.port = free_port()
        self.key = key
        self.log = log
        self.argv = [*argv, "--host", "127.0.0.1", "--port", str(self.port)]
        self.extra = extra

    def start(self) -> Server:
        """Start the process without waiting for it."""
        with self.log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "app.py"), *self.argv],
                stdout=stderr, stderr=stderr, env=clean_environment(**self.extra),
            )  # fmt: skip
        return self

    def wait(self, seconds: float = 90.0) -> Server:
        """Wait until /health says ok."""
        end = time.monotonic() + seconds
        while True:
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < end, self.output()
            with contextlib.suppress(OSError):
                if self.get("/health").status == 200:
                    return self
            time.sleep(0.05)

    def __enter__(self) -> Server:
        self.start()
        try:
            return self.wait()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self, seconds: float = 60.0) -> int:
        """End it politely and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    @property
    def workers(self) -> list[int]:
        """The pids of the processes that serve: two while one takes the place of the other."""
        master = self.process.pid
        return [*map(int, Path(f"/proc/{master}/task/{master}/children").read_text().split())]

    def output(self) -> str:
        """Return what it said so far."""
        return self.log.read_text("utf-8", "replace")

    def get(self, path: str) -> Answer:
        return self.send("GET", path)

    def post(self, path: str = "/inference", **fields: Any) -> Answer:
        return self.send("POST", path, json.dumps(fields).encode())

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Return the answer to one request on a connection of its own."""
        if self.key:
            headers.setdefault("Authorization", f"Bearer {self.key}")
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, body, {"Connection": "close", **headers})
            reply = connection.getresponse()
            return Answer(reply.status, reply.headers, reply.read())

    def switch(self, policy: str) -> Server:
        """Let another policy decide from the next iteration on."""
        body = json.dumps({"policy": policy}).encode()
        assert self.send("PUT", "/policy", body, **{"Content-Type": "application/json"}).status == 200
        return self

    def burst(self, bodies: list[dict[str, Any]]) -> list[Answer]:
        """Send all bodies at once, each on a connection that is already open; return their answers."""
        connections = [socket.create_connection(("127.0.0.1", self.port), 60) for _ in bodies]
        try:
            for connection, fields in zip(connections, bodies):
                body = json.dumps(fields).encode()
                head = f"POST /inference HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
                connection.sendall(f"{head}Connection: close\r\n\r\n".encode() + body)
            return [read_answer(connection) for connection in connections]
        finally:
            for connection in connections:
                connection.close()


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a process and those that it has started, without a warning; do nothing if it has ended."""
    if process.poll() is None:
        for pid in processes_of(process.pid):
            with contextlib.suppress(ProcessLookupError):  # a child may follow its parent by itself
                os.kill(pid, signal.SIGKILL)
        process.wait()


def processes_of(pid: int) -> list[int]:
    """Return the pid and those of its children, and of theirs."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [pid, *(other for child in map(int, listed) for other in processes_of(child))]


def read_answer(connection: socket.socket) -> Answer:
    """Read until the other side closes; return the one answer that came."""
    data = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return Answer(int(status.split()[1]), headers, body)
