"""The gunicorn workers of a server with front ends. A front end passes on what it does not carry, with the connection."""

from __future__ import annotations

import selectors
import time
from typing import Any

from gunicorn.workers.gthread import TConn

from api.schemas.body import BODY
from launch.shutdown import POLL_SECONDS
from launch.worker.callbacks import Then
from launch.worker.connections import write_error
from launch.worker.exchange import Exchange
from launch.worker.handover import written
from launch.worker.worker import Worker

IDLE_SECONDS = 0.2  # without a request of a front end, after which the engine's process may end


class PassOn(BaseException):
    """A request that only the engine's process can answer. No handler of errors may catch it."""


class FrontExchange(Exchange):
    """A request to a front end."""

    def answer(self) -> Then:
        self._link = self._worker.link
        try:
            return super().answer()
        except PassOn:
            self._worker.service.meters.arrived(-1)  # the other process counts it
            return Then.PENDING if self._pass_on() else Then.CLOSE

    def _is_lost(self) -> bool:
        """Whether the engine's process ended before anything was answered; the next one then answers."""
        link = self._link
        return link is not None and link.is_lost and BODY in self._environ and self._pass_on()

    def _pass_on(self) -> bool:
        unread = self._conn.parser.unreader.buf.getvalue()  # of the client's next request
        request = written(self._req, self._environ[BODY]).encode("latin-1") + unread
        return bool(self._worker.pass_on(self._conn, request))


class FrontWorker(Worker):
    """The worker of a front end."""

    number: int
    channel: Any  # a Channel, which imports this module
    link: Any = None  # the Link that requests are sent through
    exchange = FrontExchange

    def _needs_place(self, conn: TConn) -> bool:
        return super()._needs_place(conn) and self.link.carries

    def dispatch(self, conn: TConn) -> None:
        """Pass on what this process does not carry, as far as it has arrived."""
        if self.service.draining and self.service.engine is None:
            super().dispatch(conn)  # the engine's process may have ended
        elif not self.pass_on(conn, conn.parser.unreader.take_buffered()):
            self._closing.add(self.poller, conn)

    def pass_on(self, conn: TConn, request: bytes) -> bool:
        """Give a connection to the engine's process, or refuse it, if too many are on their way there, and return False."""
        if self.channel.handover.pass_on(conn.sock, request.decode("latin-1")):
            self.method_queue.defer(self._release, conn)
            return True
        write_error(
            conn.sock, 503, "Service Unavailable", "the server is starting, and too many requests wait for that"
        )
        return False

    def _release(self, conn: TConn) -> None:
        self.nr_conns -= 1
        conn.sock.close()  # without a shutdown, which would end the connection for the other process, too


class EngineWorker(Worker):
    """The worker that computes: it accepts no connections, but those that front ends pass on."""

    number: int
    channel: Any
    front_ends: Any = None  # set by its process
    _accepting: bool

    def set_accept_enabled(self, enabled: bool) -> None:
        enabled = enabled and (self.service is None or self.service.status()[0] != "dead")
        if enabled != self._accepting:
            self._accepting = enabled
            if enabled:
                self.poller.register(self.channel.handover, selectors.EVENT_READ, self._receive)
            else:
                self.poller.unregister(self.channel.handover)

    def _receive(self, handover: Any) -> None:
        for sock, what in handover.receive():
            if isinstance(what, int):
                self.front_ends.link(sock, what)
            elif (conn := self.adopted(sock, what)) is not None:
                self.enqueue_req(conn)

    def _drain(self, service: Any, sig: int, seconds: float) -> None:
        """Wait for the requests that front ends have accepted, too."""
        end = time.monotonic() + seconds
        idle_at = time.monotonic()
        while self.front_ends.links and time.monotonic() < min(end, idle_at + IDLE_SECONDS):
            if self.front_ends.open:
                idle_at = time.monotonic()
            time.sleep(POLL_SECONDS)
        super()._drain(service, sig, max(1.0, end - time.monotonic()))
