"""Passes requests of a failed engine whose answers have not begun to the next worker.

A process with a poisoned CUDA context must exit. Its clients' sockets stay open meanwhile, in transit through a socket pair
of gunicorn's master. This module must not know what a request asks for.
"""

from __future__ import annotations

import json
import os
import socket
import sys
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
        for sock in (self._old, self._new):
            sock.setblocking(False)  # Python 3.11's send_fds and recv_fds ignore flags
        self._kept: list[tuple[socket.socket, bytes | int]] = []

    def keep(self, client: socket.socket, request: bytes) -> None:
        """Keep a request for the next worker; from now on, this one must not use its socket."""
        self._kept.append((client, request))

    def send(self) -> None:
        """Send what was kept, as far as there is room, to the next worker, which may not exist yet."""
        for first in range(0, len(self._kept), MOST):
            self.pass_on(self._kept[first : first + MOST])

    def pass_on(self, pairs: list[tuple[socket.socket, bytes | int]]) -> bool:
        """Send up to `MOST` sockets, each with a request or a number; return False if too many are on their way."""
        # A message is too short for bodies. Linux needs no disk for a file, and a disk may be full.
        in_memory = hasattr(os, "memfd_create")
        with open(os.memfd_create("requests"), "w") if in_memory else tempfile.TemporaryFile("w") as file:
            json.dump([what if isinstance(what, int) else what.decode("latin-1") for _, what in pairs], file)
            file.flush()
            try:
                socket.send_fds(self._old, [b"\0"], [file.fileno(), *(sock.fileno() for sock, _ in pairs)])
            except BlockingIOError:
                return False
        return True

    def fileno(self) -> int:
        """Return what is readable when something was sent."""
        return self._new.fileno()

    def receive(self, messages: int = sys.maxsize) -> Iterator[tuple[socket.socket, bytes | int]]:
        """Yield the sockets that were sent in so many messages, each with its request or number."""
        for _ in range(messages):
            try:
                numbers = socket.recv_fds(self._new, 1, MOST + 1)[1]
            except BlockingIOError:
                return
            with open(numbers[0]) as file:
                file.seek(0)
                requests = json.load(file)
            for number, request in zip(numbers[1:], requests):
                yield socket.socket(fileno=number), request if isinstance(request, int) else request.encode("latin-1")


def written(req: Any, body: bytes) -> bytes:
    """Return gunicorn's request, whose body was read, as it is sent over HTTP."""
    fields = [f"{name}: {value}" for name, value in req.headers if name not in FRAMING]
    first = f"{req.method} {req.uri} HTTP/{req.version[0]}.{req.version[1]}"
    head = "\r\n".join([first, *fields, f"Content-Length: {len(body)}", "", ""])
    return head.encode("latin-1") + body


@cache
def shared() -> Handover:
    """Return the one of this master, also after it has read its configuration again: each has two sockets."""
    return Handover()
