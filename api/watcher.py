"""Notices clients that hang up while their request waits or runs: one thread for all sockets, no polling.

WSGI has no such notice, but gunicorn puts the socket into `environ["gunicorn.socket"]`. A client that closes only
its sending half (`nc -q`) cannot be told from one that has gone. Where there is no EPOLLRDHUP (macOS) the thread
peeks twice a second. It must not know what a request is.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)
PEEK_SECONDS = 0.5


class Watcher:
    """Calls back, once, when the other end of a watched socket is gone. Its thread starts with the first socket."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[int, tuple[socket.socket, Callable[[], None]]] = {}
        self._epoll: select.epoll | None = None
        self._thread: threading.Thread | None = None

    def add(self, sock: socket.socket, gone: Callable[[], None]) -> int:
        """Watch a socket; return the number to `remove` it by."""
        with self._lock:
            if self._thread is None:
                self._begin()
            number = sock.fileno()
            self._watched[number] = (sock, gone)
            if self._epoll is not None:
                mask = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR | select.EPOLLONESHOT
                self._epoll.register(number, mask)
            return number

    def remove(self, number: int) -> None:
        """Watch it no more; before the socket may be closed, since its number may be used again at once."""
        with self._lock:
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
            for number, _ in self._epoll.poll():
                self._tell(number)

    def _peek(self) -> None:
        pause = threading.Event()
        while not pause.wait(PEEK_SECONDS):
            for number, (sock, _) in list(self._watched.items()):
                try:
                    gone = sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
                except BlockingIOError:
                    gone = False
                except (OSError, ValueError):
                    gone = True
                if gone:
                    self._tell(number)

    def _tell(self, number: int) -> None:
        with self._lock:
            sock, gone = self._watched.get(number, (None, None))
            if sock is None or gone is None or not _is_gone(sock):
                return  # removed meanwhile, and the number is another's by now
        self.remove(number)
        try:
            gone()
        except Exception:
            log.exception("a disconnect could not be told")


def _is_gone(sock: socket.socket) -> bool:
    if not hasattr(select, "POLLRDHUP"):
        return True  # who peeked has seen it
    look = select.poll()
    look.register(sock, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    return bool(look.poll(0))
