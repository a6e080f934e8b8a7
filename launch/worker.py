"""gunicorn's threaded worker, mended: how it waits for a client, says goodbye to one, and to all of them.

The stock worker ends a connection in its main thread and waits there up to 2 seconds for the client to hang up too,
so that one client that does not keeps everybody else from being accepted. And it reads at most 64 KiB of a body that
nobody wanted, so that who sent 20 MB gets a reset where a 413 was meant. Here the poller does both, and nobody waits.

The stock worker stops accepting when it is told to end, while its listening socket stays open: who comes then hangs.
Here newcomers are answered (by the app, which knows that it drains) until the last request is done. And the stock
worker dies when there is no file descriptor left for a connection; here it waits a moment.

The stock worker cuts every connection when it is told to end quickly (SIGINT, SIGQUIT). Here everybody who waits gets
an error first.

The stock worker refuses what it cannot read as HTTP with a page of HTML. Here that is JSON, as all other errors are.

The stock worker refuses as fast as it can, so that clients that try again at once take the processor from those that
are served. Here a request for text that finds the server full is answered when refusals are due, or when there is room.

And the stock worker lends a thread for 5 seconds to who connects and says nothing. Here nobody has a thread before
the first byte is there, and when connections run out, the one that has been idle longest makes room.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from gunicorn import util
from gunicorn.http import wsgi
from gunicorn.http.errors import UnsupportedTransferCoding
from gunicorn.workers.gthread import PollableMethodQueue, TConn, ThreadWorker

from api.http.admission import HAS_PLACE
from api.http.deferral import Exchange
from api.http.handler_pool import BUSY_SECONDS, HandlerPool
from serving.deadlines import TokenBucket

LINGER_SECONDS = 5.0
PAUSE_SECONDS = 0.2
POLL_SECONDS = 0.02
QUICK_SECONDS = 1.5  # for the answers of a quick end
LONGEST_REASON = 200
LONGEST_START = 64  # bytes of a request line that tell whether it asks for text
REFUSALS_PER_SECOND = 50
REFUSALS_AT_ONCE = 64
REFUSAL_SECONDS = 0.02  # in which refusals are gathered, so that they wake the main thread together
PENDING = object()  # the result of a request that will be answered by the completer
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Outcome:
    """What became of a request, in the form in which gunicorn asks a future for it."""

    __slots__ = ("_result",)

    def __init__(self, result: Any) -> None:
        self._result = result

    def cancelled(self) -> bool:
        return False

    def result(self) -> Any:
        return self._result


class Callbacks(PollableMethodQueue):  # type: ignore[misc]
    """What other threads ask of the main thread; many requests wake it once."""

    _signaled = False

    def defer(self, callback: Callable[..., Any], *args: Any) -> None:
        """Let the main thread call this soon."""
        self._queue.put(partial(callback, *args))
        if not self._signaled:
            self._signaled = True
            with contextlib.suppress(OSError):  # closed: the worker ends
                os.write(self._write_fd, b"\0")

    def run_callbacks(self, _fileobj: Any, max_callbacks: int = 50) -> None:
        """Call what has been asked for by now."""
        os.read(self._read_fd, 4096)
        self._signaled = False  # before the queue is read: what comes later wakes again
        for _ in range(self._queue.qsize()):
            self._queue.get_nowait()()


class Worker(ThreadWorker):  # type: ignore[misc]
    """A gthread worker that never waits for a client in its main thread, and drains before it ends."""

    _is_quick = False
    _paused_until = 0.0
    _was_exhausted = False
    _needs_room = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.method_queue = Callbacks()
        self._parting: deque[TConn] = deque()  # answered, and not yet closed by the client
        self._held: deque[TConn] = deque()  # asking for text while the server is full
        self._refusals = TokenBucket(REFUSALS_PER_SECOND, REFUSALS_AT_ONCE)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Reject new requests, and leave when all accepted ones have an answer; gunicorn may ask more than once."""
        service = self._service
        if service is None:
            super().handle_exit(sig, frame)
        elif not service.draining:
            service.draining = True
            threading.Thread(target=self._drain, args=(service, sig), name="drain", daemon=True).start()

    def handle_quit(self, sig: int, frame: Any) -> None:
        """Give everybody who waits an error at once, and end the process."""
        if not self._is_quick:
            self._is_quick = True
            threading.Thread(target=self._leave_at_once, name="leave-at-once", daemon=True).start()

    def _leave_at_once(self) -> None:
        """Fail all requests, let their handlers write that for a moment, and end without waiting for a thread."""
        end = time.monotonic() + QUICK_SECONDS
        service = self._service
        try:
            if service is not None:
                service.draining = True
                service.stop()
                while self._is_serving and time.monotonic() < end:
                    time.sleep(POLL_SECONDS)
                service.access_log.flush(max(0.0, end - time.monotonic()))
        finally:
            os._exit(0)

    @property
    def _is_serving(self) -> bool:
        """Whether a connection is in the hands of a thread: one that is neither idle nor answered."""
        idle = (self.pending_conns, self.keepalived_conns, self._parting)
        return self.nr_conns > sum(map(len, idle))

    @property
    def _service(self) -> Any:
        """What the app says of itself; None before it is made."""
        return getattr(getattr(self, "wsgi", None), "extensions", {}).get("service")

    def _drain(self, service: Any, sig: int) -> None:
        """Wait until all requests are answered; a second before gunicorn would kill, answer the rest with an error."""
        end = time.monotonic() + self.cfg.graceful_timeout - 1.0
        while service.requests.open and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        service.stop()
        while service.requests.open and time.monotonic() < end + 0.5:
            time.sleep(POLL_SECONDS)
        super().handle_exit(sig, None)

    def accept(self, listener: Any) -> None:
        """Take a connection; without a free file descriptor, take none for a moment."""
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
        """Accept connections or not: not while there is no file descriptor for one."""
        if not enabled or time.monotonic() >= self._paused_until:
            super().set_accept_enabled(enabled)

    def enqueue_req(self, conn: TConn) -> None:
        """Hand a connection to a thread as soon as its first bytes are there."""
        if conn.initialized or conn.data_ready or not self.alive:
            if self._asks_for_text(conn):
                self._held.append(conn)
                self._release_held()
            else:
                self.tpool.submit(self._serve, conn)
            return
        conn.sock.setblocking(False)
        patience = self.wsgi.extensions["service"].config.receive_timeout
        conn.timeout = time.monotonic() + patience
        self.pending_conns.append(conn)
        readable = partial(self.on_pending_socket_readable, conn)
        self.poller.register(conn.sock, selectors.EVENT_READ, readable)

    def murder_pending(self) -> None:
        """Close who has been silent too long, or longest where there is no room for another.

        Called when all that the poller reported is handled: an idle connection has no event left that refers to it.
        """
        super().murder_pending()
        now = time.monotonic()
        while self._parting and self._parting[0].timeout <= now:
            self._close_oldest(self._parting)
        if not self._needs_room and self.nr_conns + 1 < self.worker_connections:
            return
        self._needs_room = False
        idle = self._parting or self.pending_conns or self.keepalived_conns
        if idle:
            self._close_oldest(idle)

    def _close_oldest(self, idle: deque[TConn]) -> None:
        """Close the one that has been idle longest."""
        conn = idle.popleft()
        self.poller.unregister(conn.sock)
        self._part(conn)

    def _cap_keepalive(self, deadline: float) -> None:
        """Wait for nobody who has not begun to speak when the worker ends."""
        super()._cap_keepalive(deadline)
        for conn in self.pending_conns:
            conn.timeout = min(conn.timeout, deadline)

    def wait_for_and_dispatch_events(self, timeout: float) -> None:
        """Wait for events, at most until refusals are due or handlers may have begun to wait."""
        if self._held:
            timeout = min(timeout, REFUSAL_SECONDS)
        if self.tpool.has_backlog:
            timeout = min(timeout, BUSY_SECONDS)
        super().wait_for_and_dispatch_events(timeout)
        if self._held:
            self._release_held()
        if self.tpool.has_backlog:
            self.tpool.relieve()

    def _release_held(self) -> None:
        """Let requests for text go on, the first to come first: with a place, or, when it is due, to be refused."""
        while self._held:
            has_place = self._service.places.take()
            if not has_place and not self._refusals.take(time.monotonic()):
                return
            conn = self._held.popleft()
            conn.has_place = has_place
            self.tpool.submit(self._serve, conn)

    def _asks_for_text(self, conn: TConn) -> bool:
        """Whether the request that a connection begins with generates text; it is looked at, not read."""
        if type(conn.sock) is not socket.socket or self._service is None:
            return False
        try:
            start = conn.sock.recv(LONGEST_START, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return False
        return bool(start.split(b"?", 1)[0].split(b" HTTP/", 1)[0] in self._service.generating)

    def get_thread_pool(self) -> HandlerPool:
        """Return the threads in which handlers run."""
        return HandlerPool(self.cfg.threads)

    def _serve(self, conn: TConn) -> None:
        """Answer the next request of a connection; called in a thread of the pool."""
        try:
            result = self.handle(conn)
        except BaseException:  # the connection must not be lost, whatever it was
            self._finish(conn, False)
            raise
        finally:
            if getattr(conn, "has_place", False):  # it could not be read
                conn.has_place = False
                self._service.places.give_back()
        if result is not PENDING:
            self._finish(conn, result)

    def _finish(self, conn: TConn, result: Any) -> None:
        """Let the main thread keep or close a connection whose request has been answered."""
        self.method_queue.defer(self.finish_request, conn, Outcome(result))

    def handle_request(self, req: Any, conn: TConn) -> Any:
        """Answer a request; PENDING when its answer is not known yet, and needs no thread until it is."""
        for name, value in req.headers:
            if name == "TRANSFER-ENCODING" and value.lower() != "chunked":
                raise UnsupportedTransferCoding(value)  # gunicorn lets compressed bodies through
        if type(conn.sock) is not socket.socket:  # TLS, which cannot be written to without waiting
            return super().handle_request(req, conn)
        resp, environ = wsgi.create(req, conn.sock, conn.client, conn.server, self.cfg)
        environ["wsgi.multithread"] = True
        if not self.alive or len(self.keepalived_conns) >= self.max_keepalived:
            resp.force_close()
        environ[HAS_PLACE] = getattr(conn, "has_place", False)
        conn.has_place = False
        exchange = Exchange(self.wsgi, environ, resp.start_response)
        job = None
        try:
            job = exchange.run(exchange.begin)
            if job is None:
                unsent = exchange.run(self._answer, exchange, resp)
        except OSError:  # of the client's socket: gunicorn knows what to do
            raise
        except Exception:
            if not resp.headers_sent:
                raise
            self.log.exception("a response failed after it began")  # a second one would corrupt it
            return False
        finally:
            if environ[HAS_PLACE]:  # it was refused before it could use its place
                self._service.places.give_back()
            if job is None:
                exchange.run(exchange.end)
        if job is not None:
            resume = partial(self._complete, conn, exchange, resp)
            self.wsgi.extensions["service"].completer.wait(job, resume)
            return PENDING
        if unsent:
            conn.sock.sendall(unsent)
        return not resp.should_close()

    def _complete(self, conn: TConn, exchange: Exchange, resp: Any) -> None:
        """Send the answer of a request that was PENDING; called in the completer's thread, which must not wait."""
        keeps = False
        try:
            try:
                unsent = exchange.run(self._answer, exchange, resp)
            finally:
                exchange.run(exchange.end)
            keeps = not resp.should_close()
            if unsent:
                self.method_queue.defer(self.tpool.submit, self._send_rest, conn, unsent, keeps)
                return
            keeps = self._keepalive_after(conn, keeps)
        except OSError:  # the client has gone
            keeps = False
        except Exception:
            self.log.exception("Error handling request")
            keeps = False
        self._finish(conn, keeps)

    def _send_rest(self, conn: TConn, unsent: bytes, keeps: bool) -> None:
        """Send what the socket did not take at once, in a thread that may wait."""
        try:
            conn.sock.sendall(unsent)
            keeps = self._keepalive_after(conn, keeps)
        except OSError:  # the client has gone, or takes nothing for too long
            keeps = False
        self._finish(conn, keeps)

    @staticmethod
    def _answer(exchange: Exchange, resp: Any) -> bytes:
        """Send an answer: streams to their end, all others as far as the socket takes them. Return the rest."""
        pieces = exchange.answer()
        try:
            if resp.response_length is None:
                for piece in pieces:
                    resp.write(piece)
                resp.close()
                return b""
            headers = "".join(f"{name}: {value}\r\n" for name, value in resp.headers)
            head = "".join(resp.default_headers()) + headers + "\r\n"
            resp.headers_sent = True
            message = b"".join([head.encode("latin-1"), *pieces])  # in one packet, where it fits
            try:
                return message[resp.sock.send(message, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                return message
        finally:
            if hasattr(pieces, "close"):
                pieces.close()

    def _keepalive_after(self, conn: TConn, keepalive: Any) -> Any:
        return keepalive if keepalive is PENDING else super()._keepalive_after(conn, keepalive)

    def finish_request(self, conn: TConn, fs: Outcome) -> None:
        """Keep the connection, or close it aside; called in the main thread after each request."""
        if fs.result():
            super().finish_request(conn, fs)
        else:
            self._say_goodbye(conn)

    def _say_goodbye(self, conn: TConn) -> None:
        """Close after what was sent has arrived: read what still comes until the client closes, or time is up."""
        try:
            conn.sock.setblocking(False)
            conn.sock.shutdown(socket.SHUT_WR)
        except OSError:  # the client has gone already
            self._part(conn)
            return
        conn.timeout = time.monotonic() + LINGER_SECONDS
        self._parting.append(conn)
        self.poller.register(conn.sock, selectors.EVENT_READ, partial(self._read_rest, conn))

    def _read_rest(self, conn: TConn, client: socket.socket) -> None:
        try:
            more = client.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:  # reset
            more = b""
        if not more:
            self._parting.remove(conn)
            self.poller.unregister(client)
            self._part(conn)

    def _part(self, conn: TConn) -> None:
        self.nr_conns -= 1
        conn.close()


def write_refusal(client: socket.socket, status: int, reason: str, message: str) -> None:
    """Answer what gunicorn could not read as a request: it never came as far as the app, whose errors look the same."""
    said = message if len(message) <= LONGEST_REASON else f"{message[: LONGEST_REASON - 1]}…"
    error = {
        "message": f"{said or reason}. Send a plain HTTP/1.1 request",
        "type": "server_error" if status == 500 else "invalid_request_error",
        "param": None,
        "code": None,
    }
    body = json.dumps({"error": error}).encode()
    head = (
        f"HTTP/1.1 {status} {reason}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    util.write_nonblock(client, head.encode() + body)


def limit_waiting(listener: socket.socket, receive: float, send: float) -> None:
    """Let no read of a connection wait longer than `receive` seconds for bytes, and no write than `send`.

    What the kernel is told of a listening socket holds for the connections that come of it. gunicorn reads and writes
    them in blocking mode and asks for no time of its own; who is too slow shows as BlockingIOError.
    """
    for option, seconds in ((socket.SO_RCVTIMEO, receive), (socket.SO_SNDTIMEO, send)):
        whole, rest = divmod(seconds, 1)
        value = struct.pack("ll", int(whole), int(rest * 1e6))
        listener.setsockopt(socket.SOL_SOCKET, option, value)
