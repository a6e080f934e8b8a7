"""A request and its response on a connection, from the handler to the last byte, whichever threads that takes.

This module must not know how connections are accepted and kept.
"""

from __future__ import annotations

import contextlib
import socket
from functools import partial
from typing import Any

from gunicorn.workers.gthread import TConn

from api.http.deferral import DeferredRequest
from api.schemas.body import BODY
from api.socket_writer import STREAM, Stream
from launch.worker.callbacks import Then
from launch.worker.connections import head_of, send_response
from launch.worker.handover import written
from serving.recovery import blames_kernels


class Exchange:
    """A request that a handler begins, and that another thread answers unless the answer is known at once."""

    def __init__(self, worker: Any, conn: TConn, req: Any, environ: dict[str, Any], resp: Any) -> None:
        self._worker, self._conn, self._req, self._environ, self._resp = worker, conn, req, environ, resp
        self._sock: socket.socket = conn.sock
        self._pieces: Any = None  # of a stream
        self._request = DeferredRequest(worker.wsgi, environ, resp.start_response)

    def answer(self) -> Then:
        """Answer the request; PENDING when another thread will, which then owns the connection."""
        service = self._worker.service
        work = self._request.begin()
        if work is not None:
            service.completer.wait(work, self._complete)  # which may have answered before this returns
            return Then.PENDING
        try:
            unsent = self._request.answer(self._send)
        except OSError:  # of the client's socket: gunicorn handles it
            raise
        except Exception:
            if not self._resp.headers_sent:
                raise
            self._worker.log.exception("a response failed after it began")  # a second response would corrupt it
            return Then.CLOSE
        if unsent is None:
            return Then.PENDING
        if unsent:
            self._sock.sendall(unsent)
        return Then.of(self._resp)

    def _send(self, pieces: Any) -> bytes | None:
        """Send a response, see `send_response`; return None if it is left to another thread or another engine."""
        service, resp = self._worker.service, self._resp
        if resp.response_length is None and STREAM in self._environ:
            self._pieces = pieces
            source, sock = self._environ[STREAM], self._sock
            service.socket_writer.take(Stream(source, sock, resp.chunked, self._begin, self._end, self._in_thread))
            return None
        with contextlib.closing(pieces):
            return None if resp.status_code == 503 and self._is_lost() else send_response(resp, pieces)

    def _is_lost(self) -> bool:
        """Whether fast kernels failed before anything was answered; the request is then kept for the next engine."""
        engine, body = self._worker.service.engine, self._environ.get(BODY)
        if body is None or engine is None or not blames_kernels(engine.manager.recovery.fatal):
            return False
        self._worker.handover.keep(self._sock, written(self._req, body))
        return True

    def _begin(self) -> bytes | None:
        """Return the head of a stream whose first bytes are ready; None if it is kept for the next engine."""
        if self._is_lost():
            self._pieces.close()
            return None
        self._close_if_draining()
        return head_of(self._resp)

    def _end(self, is_whole: bool) -> None:
        """End a stream, and so its request."""
        keeps = False
        try:
            self._pieces.close()
            keeps = is_whole and self._keeps()
        finally:
            self._worker.finish(self._conn, keeps)

    def _in_thread(self, task: Any) -> None:
        """Run a task in a thread that may block."""
        self._worker.method_queue.defer(self._worker.tpool.submit, task)

    def _close_if_draining(self) -> None:
        if self._worker.service.draining:
            self._resp.force_close()

    def _keeps(self) -> bool:
        """Whether the connection can take another request."""
        return bool(self._worker._keepalive_after(self._conn, Then.of(self._resp)))

    def _complete(self) -> None:
        """Send the answer of a request that was PENDING; called in the completer's thread, which must not block."""
        self._close_if_draining()
        keeps = False
        try:
            unsent = self._request.answer(self._send)
            if unsent is None:  # the connection stays open until this process ends
                return
            if unsent:
                self._in_thread(partial(self._send_rest, unsent))
                return
            keeps = self._keeps()
        except Exception as error:
            if not isinstance(error, OSError):  # which means that the client has disconnected
                self._worker.log.exception("Error handling request")
        self._worker.finish(self._conn, keeps)

    def _send_rest(self, unsent: bytes) -> None:
        """Send what the socket did not accept at once, in a thread that may block."""
        keeps = False
        with contextlib.suppress(OSError):  # the client has disconnected, or read nothing for too long
            self._sock.sendall(unsent)
            keeps = self._keeps()
        self._worker.finish(self._conn, keeps)
