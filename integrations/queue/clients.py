"""The connections of clients: how long each may wait, send and not read, how many there may be, and what ends them.

aiohttp alone keeps a connection for an hour without a request, waits forever for a client that reads nothing, inflates
bodies, and answers requests that it cannot parse in plain text. This module must not know routes or replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from api.http.errors import ApiError
from integrations.queue import errors
from integrations.queue.receiving import Limits
from terminal.shell import open_files

BACKLOG = 2048
LINGER_SECONDS = 5.0  # to read and discard what a client sends after its answer
QUIET_SECONDS, LAST_SECONDS = 0.25, 2.0  # in which one client may send again at the end, and in which any may
PAUSE_SECONDS = 0.01
SWEEP_SECONDS = 1.0  # between two looks at all connections
RESERVED_FILES = 256  # open files in addition to connections of clients, and to replicas for their requests
LINE_BYTES, FIELD_BYTES, FIELDS = 4094, 8190, 100  # of a head, as gunicorn limits them for the replicas
LONGEST_REASON = 200  # characters of the parser's message
INTERNAL = ApiError("internal error on this request. Try another request", type="server_error")
FULL = ApiError("all connections of this server are in use. Try again later", type="unavailable_error")


class Clients:
    """All connections. Those that wait for a request make room for new ones, the longest idle first."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._open: set[Client] = set()
        self._waiting: dict[Client, None] = {}  # in the order in which they began to wait

    def admit(self, client: Client) -> bool:
        """Count a new connection; return False if there is no room for it."""
        if len(self._open) >= self.limits.connections:
            # A connection that waits and has sent everything may go: its client loses nothing and connects again.
            longest = next((one for one in self._waiting if not one.unsent), None)
            if longest is None:
                return False
            self.forget(longest)
            longest.abort()
        self._open.add(client)
        self._waiting[client] = None
        return True

    def wait(self, client: Client, waits: bool) -> None:
        """Note that a connection begins or ends to wait for a request."""
        self._waiting.pop(client, None)
        if waits and client in self._open:
            self._waiting[client] = None

    def forget(self, client: Client) -> None:
        self._open.discard(client)
        self._waiting.pop(client, None)

    async def settle(self) -> None:
        """Wait until no client may be about to send a request, which would be lost if its connection closed now."""
        now = asyncio.get_running_loop().time
        end = now() + LAST_SECONDS
        while now() < end and any(client.since > now() - QUIET_SECONDS for client in self._waiting):
            await asyncio.sleep(PAUSE_SECONDS)

    async def sweep(self) -> None:
        """Close the connections whose time is up, until cancelled."""
        limits = self.limits
        pause = min(SWEEP_SECONDS, limits.receive / 4, limits.send / 4, limits.idle / 4)
        while True:
            await asyncio.sleep(pause)
            now = asyncio.get_running_loop().time()
            for client in list(self._open):
                client.check(now)


class Client(web.RequestHandler):
    """One connection: `_limit` seconds may pass since it began to wait or to send, at `since`."""

    def __init__(self, clients: Clients, server: web.Server) -> None:
        super().__init__(
            server, loop=asyncio.get_running_loop(), access_log=None, auto_decompress=False,  # type: ignore[arg-type]
            max_line_size=LINE_BYTES, max_field_size=FIELD_BYTES, max_headers=FIELDS, lingering_time=LINGER_SECONDS,
        )  # fmt: skip
        self._clients = clients
        self._connection: asyncio.Transport
        self._request: web.BaseRequest | None = None  # that is being answered
        self._is_silent = True  # since the last request
        self._unsent = 0
        self.notes: dict[str, Any] = {}  # on the present request, for the access log
        self._restart(clients.limits.receive)

    def _restart(self, limit: float) -> None:
        self.since, self._limit = self._loop.time(), limit

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a request, or refuse it where there are too many connections."""
        self._connection = cast(asyncio.Transport, transport)
        if self._clients.admit(self):
            super().connection_made(transport)
            return
        body = json.dumps(errors.content(FULL)[1]).encode()
        head = "HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._connection.write(head.encode() + body)
        self._connection.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._clients.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived; the time of a head counts from its first byte."""
        if data and self._is_silent:
            self._is_silent = False
            self._restart(self._clients.limits.receive)
        super().data_received(data)
        if self._request is not None:
            self._cut_body(self._request)

    def begin(self, request: web.BaseRequest) -> None:
        """Give a request the time that its handler takes."""
        self._request, self.notes = request, {}
        self._is_silent, self._limit = False, math.inf
        self._clients.wait(self, False)
        self._cut_body(request)

    def _cut_body(self, request: web.BaseRequest) -> None:
        """End a body of which no more can come: behind half a body, aiohttp queues only a fault that it found there."""
        if self._messages and not request.content.is_eof():
            request.content.set_exception(web.RequestPayloadError("a part of the body is missing"))

    def end(self) -> None:
        """Wait for the next request."""
        self._request, self._is_silent = None, True
        self._restart(self._clients.limits.idle)
        self._clients.wait(self, True)

    def check(self, now: float) -> None:
        """Close this connection if its client has sent or read nothing for too long."""
        if self.unsent != self._unsent:
            self._unsent, self.since = self.unsent, now
        if now - self.since > (self._clients.limits.send if self.unsent else self._limit):
            self.abort()

    @property
    def unsent(self) -> int:
        """The bytes of an answer that have not reached the client."""
        return self._connection.get_write_buffer_size()

    def abort(self) -> None:
        self._connection.abort()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Return the answer, in JSON, to a request that cannot be parsed or whose handler failed."""
        if isinstance(exc, HttpProcessingError):
            request._version = HttpVersion11  # aiohttp takes what it cannot parse for HTTP/1.0
            answer = errors.response(_malformed(exc))
        else:
            super().handle_error(request, status, exc, message)  # it logs, and raises if an answer has begun
            answer = errors.response(INTERNAL, request.method, request.path)
        answer.force_close()
        return answer


def _malformed(error: HttpProcessingError) -> ApiError:
    """Return the error for what aiohttp's parser found, with gunicorn's status."""
    if isinstance(error, LineTooLong):
        if error.args[1] == LINE_BYTES:
            return ApiError(f"the path is longer than {LINE_BYTES:,} bytes. Send a shorter one", status=414)
        return ApiError(f"a header is longer than {FIELD_BYTES:,} bytes. Send a shorter one", status=431)
    if error.message.startswith("Too many headers"):
        return ApiError(f"the request has more than {FIELDS} headers. Send fewer", status=431)
    reason = " ".join(error.message.partition("\n\n")[0].split()).rstrip(".:")
    return ApiError(f"{reason[:LONGEST_REASON] or 'Bad Request'}. Send a plain HTTP/1.1 request")


def within_open_files(limits: Limits) -> Limits:
    """Raise this process's limit on open files to what the connections need; return limits that fit where it is fixed."""
    allowed = open_files(2 * limits.connections + RESERVED_FILES)
    return limits._replace(connections=max(1, (allowed - RESERVED_FILES) // 2))


@asynccontextmanager
async def listening(app: web.Application, sock: socket.socket, limits: Limits) -> AsyncIterator[None]:
    """Serve an application at a socket."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    server = runner.server
    assert server is not None
    clients = Clients(limits)
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: Client(clients, server), sock=sock, backlog=BACKLOG)
    sweeping = loop.create_task(clients.sweep())
    try:
        yield
    finally:
        await asyncio.sleep(PAUSE_SECONDS)  # until those that have connected are accepted
        listener.close()
        await asyncio.sleep(PAUSE_SECONDS)
        await clients.settle()
        await runner.cleanup()
        sweeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sweeping
