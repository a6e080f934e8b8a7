"""The gunicorn workers of a server with front ends. A front end passes on what it does not carry, with the connection."""

from __future__ import annotations

import selectors
from typing import Any

from gunicorn.workers.gthread import TConn

from api.schemas.body import BODY
from launch.worker.callbacks import Then
from launch.worker.exchange import Exchange
from launch.worker.handover import MOST, Handover, written
from launch.worker.worker import Worker

RETRY_SECONDS = 0.02


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
            self._pass_on(self._worker.channel.handover)
            return Then.PENDING

    def _is_lost(self) -> bool:
        """Whether the engine's process ended before anything was answered; the next one then answers."""
        if self._link is None or not self._link.is_lost or BODY not in self._environ:
            return False
        self._pass_on(self._worker.handover)
        return True

    def _pass_on(self, handover: Handover) -> None:
        unread = self._conn.parser.unreader.buf.getvalue()  # of the client's next request
        request = written(self._req, self._environ[BODY]) + unread
        self._worker.method_queue.defer(self._worker.passing.append, (handover, self._conn, request))


class LinkedWorker(Worker):
    """A worker of the engine's process or of a front end."""

    number: int
    channel: Any  # a Channel, which imports this module

    @property
    def _ends(self) -> bool:
        """Whether neither this process nor that of the engine will answer a request."""
        return not self.alive and (self.service is None or self.service.status()[0] != "ok")

    def run(self) -> None:
        """See `Worker`; then leave to the next process what was passed on too late, but no links: there will be new ones."""
        super().run()
        if self._ends:
            for sock, what in self.channel.handover.receive():
                if not isinstance(what, int):
                    self.handover.keep(sock, what)
            self.handover.send()


class FrontWorker(LinkedWorker):
    """The worker of a front end."""

    link: Any = None  # the Link that requests are sent through
    exchange = FrontExchange
    passing: list[tuple[Handover, TConn, bytes]]  # for another process to answer; only the main thread changes it

    def _needs_place(self, conn: TConn) -> bool:
        return super()._needs_place(conn) and self.link.carries

    def dispatch(self, conn: TConn) -> None:
        """Pass on what this process does not carry, as far as it has arrived."""
        ends = self.service.draining and self.service.status()[0] != "ok"  # the engine's process may have ended
        if ends and super()._needs_place(conn):
            super().dispatch(conn)  # which refuses it
        else:
            handover = self.handover if ends else self.channel.handover
            self.passing.append((handover, conn, conn.parser.unreader.take_buffered()))

    def wait_for_and_dispatch_events(self, timeout: float) -> None:
        """See `Worker`; then pass on many connections in one message, again and again while too many are on their way."""
        super().wait_for_and_dispatch_events(min(timeout, RETRY_SECONDS) if self.passing else timeout)
        for handover in (self.channel.handover, self.handover):
            batch = [entry for entry in self.passing if entry[0] is handover][:MOST]
            if batch and (handover.pass_on([(conn.sock, request) for _, conn, request in batch]) or self._ends):
                self.passing[:] = [entry for entry in self.passing if entry not in batch]  # others append to it
                self.nr_conns -= len(batch)
                for _, conn, _ in batch:
                    conn.sock.close()  # without a shutdown, which would end the connection for the other process, too


class EngineWorker(LinkedWorker):
    """The worker that computes: it accepts no connections, but those that front ends pass on."""

    idle_looks = 10
    front_ends: Any = None  # set by its process
    sources: list[Handover]  # not of an engine that has failed: what it keeps is for the next process
    _accepting: bool

    def adopt(self) -> None:
        """Answer the requests of a process that has ended, also those that front ends pass on later."""
        super().adopt()
        self.set_accept_enabled(False)  # until the main thread's next turn
        self.sources.append(self.handover)

    def set_accept_enabled(self, enabled: bool) -> None:
        enabled = enabled and not self._is_dead
        if enabled != self._accepting:
            self._accepting = enabled
            for handover in self.sources:
                if enabled:
                    self.poller.register(handover, selectors.EVENT_READ, self._receive)
                else:
                    self.poller.unregister(handover)

    @property
    def _is_dead(self) -> bool:
        return self.service is not None and self.service.status()[0] == "dead"

    def _receive(self, handover: Any) -> None:
        for sock, what in () if self._is_dead else handover.receive(1):
            if isinstance(what, int):
                self.front_ends.link(sock, what)
            else:
                self.take_over(sock, what)
