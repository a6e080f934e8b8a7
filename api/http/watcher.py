"""Notices clients that disconnect while their request waits or runs: one thread for all sockets, without polling.

WSGI does not report this, but gunicorn puts the socket into `environ["gunicorn.socket"]`. A client that
half-closes its connection (`nc -q`) is treated as disconnected. Without EPOLLRDHUP (macOS) the thread peeks twice a
second. This module must not know what a request is.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

log = logging.getLogger(__name__)
PEEK_SECONDS = 0.5


class Watch(NamedTuple):
    """A watched socket, with the callback to call when its client disconnects."""

    sock: socket.socket
    report: Callable[[list[Any]], None]
    client: Any


class Watcher:
    """Reports, once, that the client of a watched socket has disconnected. Its thread starts with the first socket."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[int, Watch] = {}
        self._epoll: select.epoll | None = None
        self._thread: threading.Thread | None = None

    def add(self, sock: socket.socket, report: Callable[[list[Any]], None], client: Any) -> int:
        """Watch a socket; return the number to `remove` it by.

        `report` is called with a list of all clients that have disconnected by then, including `client`.
        """
        with self._lock:
            if self._thread is None:
                self._begin()
            number = sock.fileno()
            self._watched[number] = Watch(sock, report, client)
            if self._epoll is not None:
                mask = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR | select.EPOLLONESHOT
                self._epoll.register(number, mask)
            return number

    def remove(self, number: int) -> None:
        """Stop watching a socket. Call this before closing it, because its number may be reused at once."""
        with self._lock:
            self._forget(number)

    def _forget(self, number: int) -> None:
        if self._watched.pop(number, None) is not None and self._epoll is not None:
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(number)

    def _begin(self) -> None:
        if hasattr(select, "EPOLLRDHUP"):
            self._epoll = select.epoll()
        run = self._wait if self._epoll is not None else self._peek
        self._thread = threading.Thread(target=run, name="disconnect-watcher", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        assert self._epoll is not None
        while True:
            self._report([number for number, _ in self._epoll.poll()])

    def _peek(self) -> None:
        pause = threading.Event()
        while not pause.wait(PEEK_SECONDS):
            gone = []
            for number, watch in list(self._watched.items()):
                try:
                    is_gone = watch.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
                except BlockingIOError:
                    is_gone = False
                except (OSError, ValueError):
                    is_gone = True
                if is_gone:
                    gone.append(number)
            self._report(gone)

    def _report(self, numbers: list[int]) -> None:
        """Report disconnected clients, except sockets removed meanwhile, whose numbers may be reused."""
        reports: dict[Callable[[list[Any]], None], list[Any]] = {}
        with self._lock:
            watched = {n: self._watched[n] for n in numbers if n in self._watched}
            for number in _gone(list(watched)):
                self._forget(number)
                reports.setdefault(watched[number].report, []).append(watched[number].client)
        for report, gone in reports.items():
            try:
                report(gone)
            except Exception:
                log.exception("cannot cancel the request of a disconnected client")


def _gone(numbers: list[int]) -> list[int]:
    """Return the sockets whose clients have disconnected."""
    if not hasattr(select, "POLLRDHUP"):
        return numbers  # peeking has shown it
    poll = select.poll()
    for number in numbers:
        poll.register(number, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    return [number for number, _ in poll.poll(0)]
