"""Passes requests of a failed engine whose answers have not begun to the next worker.

A process with a poisoned CUDA context must exit. Its clients' sockets stay open meanwhile, in transit through a socket pair
of gunicorn's master. This module must not know what a request asks for.
"""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Iterator
from functools import cache
from typing import Any

MOST = 250  # sockets in a message, of which Linux takes 253
FRAMING = ("CONTENT-LENGTH", "EXPECT", "TRANSFER-ENCODING")  # of a body that was read


class Handover:
    """Made in the master, so that its workers share it; `keep` may be called in any thread."""

    def __init__(self) -> None:
        self._old, self._new = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._new.setblocking(False)  # Python 3.11's recv_fds ignores flags
        self._kept: list[tuple[socket.socket, str]] = []

    def keep(self, req: Any, client: socket.socket, body: bytes) -> None:
        """Keep gunicorn's request `req`; from now on, this worker must not use its socket."""
        fields = [f"{name}: {value}" for name, value in req.headers if name not in FRAMING]
        first = f"{req.method} {req.uri} HTTP/{req.version[0]}.{req.version[1]}"
        head = "\r\n".join([first, *fields, f"Content-Length: {len(body)}", "", ""])
        self._kept.append((client, head + body.decode("latin-1")))

    def send(self) -> None:
        """Send what was kept to the next worker, which may not exist yet."""
        for first in range(0, len(self._kept), MOST):
            clients, requests = zip(*self._kept[first : first + MOST])
            with tempfile.TemporaryFile("w") as file:  # a message is too short for bodies
                json.dump(requests, file)
                file.flush()
                socket.send_fds(self._old, [b"\0"], [file.fileno(), *(client.fileno() for client in clients)])

    def receive(self) -> Iterator[tuple[socket.socket, bytes]]:
        """Yield the sockets and requests that were sent."""
        while True:
            try:
                numbers = socket.recv_fds(self._new, 1, MOST + 1)[1]
            except BlockingIOError:
                return
            with open(numbers[0]) as file:
                file.seek(0)
                requests = json.load(file)
            for number, request in zip(numbers[1:], requests):
                yield socket.socket(fileno=number), request.encode("latin-1")


@cache
def shared() -> Handover:
    """Return the one of this master, also after it has read its configuration again: each has two sockets."""
    return Handover()
