"""A load generator in one thread: clients that send their next request as soon as the last is answered.

It sends one prepared request over and over on connections that stay open, so that it takes little of the processor that
it shares with the server.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Load:
    """What the clients measured: seconds of each answer, and answers by status."""

    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    client_cpu: float = 0.0

    def percentile_ms(self, q: int) -> float:
        return 1e3 * sorted(self.latencies)[len(self.latencies) * q // 100]


class Client:
    """One connection, and what has come of an answer."""

    def __init__(self, port: int, request: bytes) -> None:
        self._request = request
        self._received = b""
        self._length = -1
        self.socket = socket.create_connection(("127.0.0.1", port), 30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self) -> None:
        self._received, self._length, self.sent_at = b"", -1, time.perf_counter()
        self.socket.sendall(self._request)

    def read(self) -> int | None:
        """Return the status when the answer is whole, None before; ConnectionError when it never will be."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the server closed the connection")
        self._received += data
        if self._length < 0:
            head, end, _ = self._received.partition(b"\r\n\r\n")
            if not end:
                return None
            length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
            if not length:  # a stream
                return int(self._received[9:12]) if self._received.endswith(b"\r\n0\r\n\r\n") else None
            self._length = len(head) + 4 + int(length)
        return int(self._received[9:12]) if len(self._received) >= self._length else None


def request(path: str, body: bytes | None = None, headers: str = "") -> bytes:
    """Return a request as it goes over the wire: a POST if there is a body."""
    method = "GET" if body is None else "POST"
    length = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{length}{headers}\r\n".encode() + (body or b"")


def run(port: int, clients: int, message: bytes, seconds: float) -> Load:
    """Run this many clients that send a request repeatedly; return what they measured."""
    load = Load()
    poll = select.epoll()
    by_number: dict[int, Client] = {}

    def connect() -> None:
        client = Client(port, message)
        by_number[client.socket.fileno()] = client
        poll.register(client.socket.fileno(), select.EPOLLIN)
        client.send()

    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(clients):
        connect()
    while (now := time.perf_counter()) - began < seconds:
        for number, _ in poll.poll(0.1):
            client = by_number[number]
            try:
                status = client.read()
                if status is None:
                    continue
                now = time.perf_counter()
                load.statuses[status] += 1
                load.latencies.append(now - client.sent_at)
                client.send()
            except OSError:
                client.socket.close()  # which also takes it out of the poll
                del by_number[number]
                connect()
    load.seconds = time.perf_counter() - began
    load.client_cpu = time.process_time() - cpu
    for client in by_number.values():
        client.socket.close()
    return load


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process and its children have taken."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(map(cpu_seconds, (pid, *map(int, children))))


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has taken; 0 of one that has ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0
