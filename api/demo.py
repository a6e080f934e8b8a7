"""The load that a button of the live page fires: plain requests to this very server, over its own socket.

A browser opens at most six connections to a host, so that a burst from its page would never fill a batch. One thread
sends and reads all of them. It must not know what is served.
"""

from __future__ import annotations

import contextlib
import json
import random
import selectors
import socket
import threading
import time
from typing import Any

from api.schemas.demo import LoadRequest

PROMPTS = (
    "ROMEO:", "JULIET:\nO ", "First Citizen:\nBefore we proceed any further, hear me speak.\n", "KING RICHARD:\n",
    "To be, or not to be", "Shall I compare thee", "All the world's a stage,\nAnd all the men and women",
    "MENENIUS:\nThere was a time when all the body's members\nRebell'd against the belly", "Good morrow, cousin.",
    "Now is the winter of our discontent\nMade glorious summer by this sun of York", "What, ho!", "DUKE OF YORK:\n",
)  # fmt: skip
PATIENCE = 600.0  # seconds, after which nobody is waited for


class Load:
    """One load at a time; its figures may be read from any thread."""

    def __init__(self) -> None:
        self.total = self.sent = self.done = self.failed = self.seed = 0
        self.active = False
        self._stopping = False
        self._lock = threading.Lock()

    def start(self, address: Any, authorization: str | None, asked: LoadRequest) -> bool:
        """Begin to send; False when another load is under way."""
        with self._lock:
            if self.active:
                return False
            self.active, self._stopping = True, False
            self.total, self.seed = asked.count, asked.seed
            self.sent = self.done = self.failed = 0
        plan = planned(asked)
        thread = threading.Thread(target=self._run, args=(address, authorization, plan), name="demo-load", daemon=True)
        thread.start()
        return True

    def stop(self) -> None:
        """Send no more; those who are under way are answered."""
        self._stopping = True

    def progress(self) -> dict[str, Any]:
        return {
            "total": self.total, "sent": self.sent, "done": self.done, "failed": self.failed,
            "active": self.active, "seed": self.seed,
        }  # fmt: skip

    def _run(self, address: Any, authorization: str | None, plan: list[tuple[float, bytes]]) -> None:
        with selectors.DefaultSelector() as selector:
            try:
                self._fire(selector, address, authorization, plan)
            finally:
                for key in list(selector.get_map().values()):
                    key.fileobj.close()  # type: ignore[union-attr]
                self.active = False

    def _fire(
        self, selector: selectors.BaseSelector, address: Any, authorization: str | None, plan: list[tuple[float, bytes]]
    ) -> None:
        began = time.monotonic()
        todo = list(reversed(plan))
        while todo or selector.get_map():
            now = time.monotonic() - began
            if self._stopping or now > PATIENCE:
                todo.clear()
            if now > PATIENCE:
                return
            while todo and todo[-1][0] <= now:
                self._send(selector, address, authorization, todo.pop()[1])
            due = todo[-1][0] - now if todo else 0.5
            for key, _ in selector.select(max(0.0, min(due, 0.5))):
                self._read(selector, key)

    def _send(self, selector: selectors.BaseSelector, address: Any, authorization: str | None, body: bytes) -> None:
        self.sent += 1
        key = f"Authorization: {authorization}\r\n" if authorization else ""
        head = (
            "POST /inference HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n{key}\r\n"
        )
        sock: socket.socket | None = None
        try:
            sock = socket.create_connection(address[:2], 5)
            sock.sendall(head.encode("latin-1") + body)
            selector.register(sock, selectors.EVENT_READ, bytearray())
        except OSError:
            self.failed += 1
            if sock is not None:
                sock.close()

    def _read(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        sock: Any = key.fileobj
        piece = b""
        with contextlib.suppress(OSError):
            piece = sock.recv(1 << 16)
        if piece:
            key.data.extend(piece[: max(0, 64 - len(key.data))])
            return
        selector.unregister(sock)
        sock.close()
        if key.data.startswith(b"HTTP/1.1 200"):
            self.done += 1
        else:
            self.failed += 1


def planned(asked: LoadRequest) -> list[tuple[float, bytes]]:
    """Return when to send what, the same for the same seed: exponential gaps, or none at rate 0."""
    chance = random.Random(asked.seed)
    low, high = sorted((asked.min_tokens, asked.max_tokens))
    at = 0.0
    plan = []
    for _ in range(asked.count):
        at += chance.expovariate(asked.rate) if asked.rate else 0.0
        fields = {
            "prompt": chance.choice(PROMPTS),
            "num_tokens": chance.randint(low, high),
            "seed": chance.getrandbits(31),
        }
        plan.append((at, json.dumps(fields).encode()))
    return plan
