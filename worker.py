"""gunicorn's threaded worker, with one thing mended: how it says goodbye to a client.

The stock worker ends a connection in its main thread and waits there up to 2 seconds for the client to hang up too,
so that one client that does not keeps everybody else from being accepted. And it reads at most 64 KiB of a body that
nobody wanted, so that who sent 20 MB gets a reset where a 413 was meant. Here a thread of the pool does both.
"""

from __future__ import annotations

import contextlib
import socket
import time
from concurrent.futures import Future
from typing import Any

from gunicorn.workers.gthread import TConn, ThreadWorker

LINGER_SECONDS = 5.0


class Worker(ThreadWorker):  # type: ignore[misc]
    """A gthread worker that never waits for a client in its main thread."""

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
