"""The processes of a fleet under measurement: `python -m integrations.ray.serve`, its replicas, and a network namespace for all."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from client.send.servers import free_port

ISOLATED = "EB_INTERNAL_ISOLATED"
ACTOR, SERVER = "ray::ServeReplica", "gunicorn"


def isolate() -> None:
    """Run this command again in a network namespace of its own, and there bring up the loopback interface."""
    if os.environ.get(ISOLATED) is None:
        command = [sys.executable, "-m", "dev.benchmarks.fleet", *sys.argv[1:]]
        os.execvpe(
            "unshare", ["unshare", "--user", "--map-root-user", "--net", *command], {**os.environ, ISOLATED: "1"}
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh", b"lo", 1 | 64))  # SIOCSIFFLAGS: IFF_UP, IFF_RUNNING


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the processes that a process has started, at any depth, with their command lines."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield child, Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
                yield from descendants(child)


class Fleet:
    """`python -m integrations.ray.serve` on a free port."""

    def __init__(self, *arguments: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        began = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "integrations.ray.serve", *arguments, "--host", "127.0.0.1", "--port", str(port)],
            stderr=sys.stderr,
        )
        self.began = began

    def find(self, name: str) -> list[tuple[int, str]]:
        """Return the processes of replicas whose command line has this text, the oldest first."""
        actors = [found for found in descendants(self.process.pid) if ACTOR in found[1]]
        if name == ACTOR:
            return sorted(actors)
        return sorted(found for pid, _ in actors for found in descendants(pid) if name in found[1])

    def servers(self) -> list[str]:
        """Return the addresses of the replicas' own servers."""
        commands = {command for _, command in self.find("app.py --host")}
        return [f"http://127.0.0.1:{command.split('--port ')[1].split()[0]}" for command in sorted(commands)]

    async def ready(self, session: aiohttp.ClientSession, replicas: int, seconds: float = 180.0) -> float:
        """Wait until all replicas are ready; return the seconds since this object was made."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end and self.process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError, ValueError):
                if len(await self.replicas(session)) == replicas:
                    return time.perf_counter() - self.began
            await asyncio.sleep(0.2)
        raise SystemExit(f"error: the fleet ended, or was not ready after {seconds:g} s. See above")

    async def replicas(self, session: aiohttp.ClientSession) -> list[str]:
        """Return the names of the replicas that take requests."""
        async with session.get(f"{self.url}/upstreams") as answer:
            return [one["name"] for one in await answer.json()]

    async def stats(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        """Return the statistics of each replica."""
        found = {}
        for name in await self.replicas(session):
            async with session.get(f"{self.url}/upstream/{name}/stats") as answer:
                found[name] = await answer.json()
        return found

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(120)


@contextlib.asynccontextmanager
async def running(replicas: int, *arguments: str) -> AsyncIterator[tuple[Fleet, aiohttp.ClientSession, float]]:
    """Start a fleet; yield it with a session, and the seconds of its start."""
    fleet = Fleet(*arguments, "--replicas", str(replicas))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(120)) as session:
        try:
            yield fleet, session, await fleet.ready(session, replicas)
        finally:
            fleet.stop()
