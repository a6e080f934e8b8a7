"""The gunicorn worker: a gthread worker whose main thread never waits for a client, and that drains before it exits.

The stock gthread worker does none of that. It

* waits up to 2 seconds in its main thread for a client to close, and reads at most 64 KiB of a rejected body;
* leaves new clients waiting while it shuts down, and closes all connections on SIGINT and SIGQUIT without an answer;
* exits when no file descriptor is left for a connection;
* lends a thread for 5 seconds to a client that connects and sends nothing;
* rejects requests as fast as it can, so that clients that retry at once take the processor from accepted requests.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from collections import deque
from functools import partial
from typing import Any

from gunicorn.http import wsgi
from gunicorn.http.errors import UnsupportedTransferCoding
from gunicorn.workers.gthread import STOP_KEEPALIVE_LINGER, TConn, ThreadWorker

from api.hooks.admission import PLACE
from api.hooks.refusal import refuse
from launch.shutdown import drain, exit_at_once
from launch.worker import connections
from launch.worker.callbacks import Callbacks, Then
from launch.worker.connections import ClosingConnections, Parser, plain_request, send_response
from launch.worker.exchange import Exchange
from launch.worker.handler_pool import BUSY_SECONDS, HandlerPool
from launch.worker.handover import Handover
from serving.deadlines import TokenBucket
from serving.places import Place, Places

REQUEST_LINE_BYTES = 64  # enough for every path that generates text
PAUSE_SECONDS = 0.2  # without accepting, after the file descriptors have run out
REJECTIONS_PER_SECOND = 50
REJECTION_BURST = 64
REJECTION_SECONDS = 0.1  # between two looks at waiting requests, so that one wakeup rejects several
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Worker(ThreadWorker):  # type: ignore[misc]
    """A gthread worker that never waits for a client in its main thread, and drains before it exits.

    Only the main thread touches the poller, the connections that wait in it, and `nr_conns`. Handlers and the completer
    own one connection at a time, and hand it back through `method_queue`.
    """

    _is_quick = False
    _paused_until = 0.0
    _was_exhausted = False
    _needs_room = False
    idle_looks = 0  # that find no request, after which the process may end, as others may have accepted some
    handover: Handover  # set by `EngineProcess`
    exchange = Exchange

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.method_queue = Callbacks()
        self._is_plain = connections.is_plain(self.cfg)
        self._waiting: deque[TConn] = deque()  # requests for text while the server is full
        self._rejections = TokenBucket(REJECTIONS_PER_SECOND, REJECTION_BURST)
        self._closing = ClosingConnections(self._forget)

    def _forget(self) -> None:
        self.nr_conns -= 1

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Reject new requests, and exit when all accepted ones are answered; gunicorn may call this more than once."""
        service = self.service
        if service is None:
            super().handle_exit(sig, frame)
        elif not service.draining:
            service.draining = True
            arguments = (service, sig, self.cfg.graceful_timeout)
            threading.Thread(target=self._drain, args=arguments, name="drain", daemon=True).start()

    def handle_quit(self, sig: int, frame: Any) -> None:
        """Answer all open requests with an error at once, and exit."""
        if not self._is_quick:
            self._is_quick = True
            arguments = (self.service, self._has_unanswered)
            threading.Thread(target=exit_at_once, args=arguments, name="exit-at-once", daemon=True).start()

    def _has_unanswered(self) -> bool:
        """Whether a connection is neither idle nor closing."""
        return bool(self.nr_conns > sum(map(len, (self.pending_conns, self.keepalived_conns, self._closing))))

    @property
    def service(self) -> Any:
        """The app's service; None before the app is created."""
        return getattr(getattr(self, "wsgi", None), "extensions", {}).get("service")

    def _drain(self, service: Any, sig: int, seconds: float) -> None:
        """End the open requests before gunicorn kills the worker, and exit."""
        drain(service, seconds, self.idle_looks)
        super().handle_exit(sig, None)

    def accept(self, listener: Any) -> None:
        """Accept a connection; pause if no file descriptor is left for one and no idle connection can be closed."""
        try:
            super().accept(listener)
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            if not self._was_exhausted:
                self.log.error("no file descriptors left for a new connection. Raise 'ulimit -n'")
            self._was_exhausted = self._needs_room = True
            if not (self.pending_conns or self.keepalived_conns):
                self._paused_until = time.monotonic() + PAUSE_SECONDS
                self.set_accept_enabled(False)

    def set_accept_enabled(self, enabled: bool) -> None:
        """Start or stop accepting connections; do not start during a pause."""
        if not enabled or time.monotonic() >= self._paused_until:
            super().set_accept_enabled(enabled)

    def enqueue_req(self, conn: TConn) -> None:
        """Hand a connection to a thread as soon as its first bytes have arrived."""
        if conn.initialized or conn.data_ready or not self.alive:
            if self._needs_place(conn):
                self._waiting.append(conn)
                self._dispatch_waiting()
            else:
                self.dispatch(conn)
            return
        config = self.service.config
        if not connections.LIMITS_ARE_INHERITED:
            connections.limit_blocking(conn.sock, config.receive_timeout, config.send_timeout)
        conn.sock.setblocking(False)
        conn.timeout = time.monotonic() + config.receive_timeout
        self.pending_conns.append(conn)
        readable = partial(self.on_pending_socket_readable, conn)
        self.poller.register(conn.sock, selectors.EVENT_READ, readable)

    def dispatch(self, conn: TConn) -> None:
        """Hand a connection to a thread, whose request needs no place."""
        self.tpool.submit(self._serve, conn)

    def murder_pending(self) -> None:
        """Close connections that have been silent for too long, and the longest idle one if there is no room for another.

        gunicorn calls this after it has handled all events: no event refers to an idle connection any more.
        """
        super().murder_pending()
        self._closing.expire(self.poller, time.monotonic())
        if not self._needs_room and self.nr_conns + 1 < self.worker_connections:
            return
        self._needs_room = False
        if self._closing:
            self._closing.close_oldest(self.poller)
        elif idle := self.pending_conns or self.keepalived_conns:
            idle[0].timeout = 0.0
            self.murder_keepalived()
            super().murder_pending()

    def _cap_keepalive(self, deadline: float) -> None:
        """Wait for no connection that has sent nothing when the worker exits."""
        super()._cap_keepalive(deadline)
        for conn in self.pending_conns:
            conn.timeout = min(conn.timeout, deadline)

    def wait_for_and_dispatch_events(self, timeout: float) -> None:
        """Wait for events, but not longer than until rejections are due or blocked handlers must be relieved."""
        if self._waiting:
            timeout = min(timeout, REJECTION_SECONDS)
        if self.tpool.has_backlog:
            timeout = min(timeout, BUSY_SECONDS)
        super().wait_for_and_dispatch_events(timeout)
        if self._waiting:
            self._dispatch_waiting()
        if self.tpool.has_backlog:
            self.tpool.relieve()

    def _dispatch_waiting(self) -> None:
        """Hand waiting requests to threads in their order: those with a place, and those whose rejection is due."""
        # Before the body is read: a full server must not read, check and tokenize what it will refuse.
        places: Places = self.service.engine.manager.inbox.places
        while self._waiting:
            place = places.lend()
            if place is None and not self._rejections.take(time.monotonic()):
                return
            conn = self._waiting.popleft()
            if place is not None or not self._refuse(conn):
                self.tpool.submit(self._serve, conn, place)

    @property
    def _must_close(self) -> bool:
        """Whether a connection must end with its response: the client's next one may reach another server."""
        return not self.alive or self.service.draining or len(self.keepalived_conns) >= self.max_keepalived

    def _refuse(self, conn: TConn) -> bool:
        """Refuse a request in this thread and return True, or return False: a handler must answer it."""
        if self._must_close or (plain := plain_request(self._arrived(conn))) is None:
            return False
        resp, environ = wsgi.create(plain, conn.sock, conn.client, conn.server, self.cfg)
        if (body := refuse(self.wsgi, environ, resp.start_response)) is None:
            return False
        conn.parser.unreader.take_buffered()
        try:
            if send_response(resp, [body]):
                raise OSError("the client reads nothing")
        except OSError:
            self._closing.add(self.poller, conn)
            return True
        self._keep(conn)
        return True

    def _needs_place(self, conn: TConn) -> bool:
        """Whether the next request of a connection generates text; without an engine it is refused in any case."""
        service, start = self.service, self._arrived(conn)[:REQUEST_LINE_BYTES]
        has_engine = service is not None and service.engine is not None
        return has_engine and start.partition(b"?")[0].partition(b" HTTP/")[0].decode("latin-1") in service.generating

    def _arrived(self, conn: TConn) -> bytes:
        """Return what has arrived of the next request of a connection, nothing under TLS or HTTP/2."""
        if conn.parser is None and self._is_plain:
            conn.parser = Parser(self.cfg, conn.sock, conn.client)
        data = conn.parser.arrived() if isinstance(conn.parser, Parser) else b""
        conn.data_ready = conn.data_ready or bool(data)
        return data

    def get_thread_pool(self) -> HandlerPool:
        """Return the threads in which handlers run."""
        return HandlerPool(self.cfg.threads)

    def _serve(self, conn: TConn, place: Place | None = None) -> None:
        """Answer the next request of a connection; called in a thread of the pool."""
        conn.place = place  # for `handle_request`, which gunicorn's `handle` calls
        try:
            result = self.handle(conn)
        except BaseException:  # the connection must not leak, whatever happened
            self.finish(conn, False)
            raise
        finally:
            # Given back here unless the request got as far as the registry, which many do not: some cannot be read, some
            # have no key. `conn` may not be asked: once a request is pending, the connection belongs to other threads.
            if place is not None and not place.is_claimed:
                place.give_back()
        if result is not Then.PENDING:
            self.finish(conn, result)

    def finish(self, conn: TConn, keeps: Any) -> None:
        """Make the main thread keep or close a connection whose request has been answered."""
        if keeps:
            self.method_queue.defer(self._keep, conn)
        else:
            self.method_queue.defer(self._closing.add, self.poller, conn)

    def _keep(self, conn: TConn) -> None:
        """Wait for the next request of a connection; called in the main thread."""
        if conn.parser.unreader.buf.getvalue():  # it has arrived with the one before
            self.enqueue_req(conn)
            return
        conn.sock.setblocking(False)
        conn.set_timeout()
        if not self.alive:
            conn.timeout = min(conn.timeout, time.monotonic() + STOP_KEEPALIVE_LINGER)
        self.keepalived_conns.append(conn)
        self.poller.register(conn.sock, selectors.EVENT_READ, partial(self.on_client_socket_readable, conn))

    def adopt(self) -> None:
        """Answer the requests that the previous worker has handed over; called in the main thread."""
        for client, request in self.handover.receive():
            self.take_over(client, request)

    def take_over(self, client: socket.socket, request: Any) -> None:
        """Answer a connection of another process, with what that has read, unless the client has disconnected."""
        try:
            conn = TConn(self.cfg, client, client.getpeername(), client.getsockname())
        except OSError:
            client.close()
            return
        conn.parser = Parser(self.cfg, client, conn.client)
        conn.parser.unreader.unread(request)
        conn.data_ready = True
        self.nr_conns += 1
        self.enqueue_req(conn)

    def handle_request(self, req: Any, conn: TConn) -> Then:
        """Answer a request; PENDING when its answer is not whole yet. It holds no thread until then."""
        for name, value in req.headers:
            if name == "TRANSFER-ENCODING" and value.lower() != "chunked":
                raise UnsupportedTransferCoding(value)  # gunicorn lets compressed bodies through
        if type(conn.sock) is not socket.socket:  # TLS: a write could block
            return Then.KEEP if super().handle_request(req, conn) else Then.CLOSE
        resp, environ = wsgi.create(req, conn.sock, conn.client, conn.server, self.cfg)
        environ["wsgi.multithread"] = True
        if self._must_close:
            resp.force_close()
        environ[PLACE] = conn.place
        if body := refuse(self.wsgi, environ, resp.start_response):
            conn.sock.sendall(send_response(resp, [body]))
            return Then.of(resp)
        return self.exchange(self, conn, req, environ, resp).answer()

    def _keepalive_after(self, conn: TConn, keepalive: Then) -> Any:
        return keepalive if keepalive is Then.PENDING else super()._keepalive_after(conn, keepalive is Then.KEEP)
