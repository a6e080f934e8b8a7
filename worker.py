"""gunicorn's threaded worker, with three things mended: how it says goodbye to a client, and to all of them.

The stock worker ends a connection in its main thread and waits there up to 2 seconds for the client to hang up too,
so that one client that does not keeps everybody else from being accepted. And it reads at most 64 KiB of a body that
nobody wanted, so that who sent 20 MB gets a reset where a 413 was meant. Here a thread of the pool does both.

The stock worker stops accepting when it is told to end, while its listening socket stays open: who comes then hangs.
Here newcomers are answered (by the app, which knows that it drains) until the last request is done. And the stock
worker dies when there is no file descriptor left for a connection; here it waits a moment.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from concurrent.futures import Future
from typing import Any

from gunicorn.workers.gthread import TConn, ThreadWorker

LINGER_SECONDS = 5.0
PAUSE_SECONDS = 0.2
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Worker(ThreadWorker):  # type: ignore[misc]
    """A gthread worker that never waits for a client in its main thread, and drains."""

    _paused_until = 0.0
    _was_exhausted = False

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Refuse new work and leave when nobody is here any more; at once when told so twice."""
        service = getattr(getattr(self, "wsgi", None), "extensions", {}).get("service")
        if service is None or service.draining:
            super().handle_exit(sig, frame)
            return
        service.draining = True
        threading.Thread(target=self._drain, args=(service, sig), name="drain", daemon=True).start()

    def _drain(self, service: Any, sig: int) -> None:
        """Wait until all are answered; a second before gunicorn would kill, tell the rest that it ends."""
        end = time.monotonic() + self.cfg.graceful_timeout - 1.0
        while service.visits.open and time.monotonic() < end:
            time.sleep(0.02)
        service.stop()
        while service.visits.open and time.monotonic() < end + 0.5:
            time.sleep(0.02)
        super().handle_exit(sig, None)

    def accept(self, listener: Any) -> None:
        """Take a connection; without a free file descriptor, take none for a moment."""
        try:
            super().accept(listener)
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            if not self._was_exhausted:
                self.log.error("no file descriptor for a connection: raise 'ulimit -n'")
            self._was_exhausted = True
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            self.set_accept_enabled(False)

    def set_accept_enabled(self, enabled: bool) -> None:
        """Listen or not, and not while there is nothing to take a connection with."""
        if not enabled or time.monotonic() >= self._paused_until:
            super().set_accept_enabled(enabled)

    def finish_request(self, conn: TConn, fs: Future[Any]) -> None:
        """Keep the connection, or close it aside; called in the main thread after each request."""
        if fs.cancelled() or fs.exception() is not None or fs.result():
            super().finish_request(conn, fs)
            return
        try:
            self.tpool.submit(self._say_goodbye, conn)
        except RuntimeError:  # the pool has been shut down
            super().finish_request(conn, fs)

    def _say_goodbye(self, conn: TConn) -> None:
        linger(conn.sock)
        self.method_queue.defer(self._closed)

    def _closed(self) -> None:
        self.nr_conns -= 1


def linger(connection: socket.socket, seconds: float = LINGER_SECONDS) -> None:
    """Close after what was sent has arrived: read what still comes until the client closes, or time is up."""
    end = time.monotonic() + seconds
    with contextlib.suppress(OSError), connection:
        connection.shutdown(socket.SHUT_WR)
        while (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            if not connection.recv(1 << 16):
                break
