"""What every request to a queue passes first: the check of its origin, its key, and a shutdown that loses no answer."""

from __future__ import annotations

import asyncio
import hmac
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, cast

from aiohttp import web

from api.hooks import cors
from api.http.errors import ApiError, shown
from api.service import Service
from integrations.queue import errors
from integrations.queue.clients import Client, listening, within_open_files
from integrations.queue.receiving import ClientLeft, Limits

GONE = 499  # for a client that has already left
PAUSE_SECONDS = 0.1
SIMPLE = ("text/plain", "multipart/form-data", "application/x-www-form-urlencoded")  # that a browser sends anywhere
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Door:
    """Counts the open requests; `draining` makes it refuse new ones that generate text."""

    service: Service

    def __init__(self, limits: Limits, key: str = "") -> None:
        self.limits = limits
        self._key = key.encode()
        self.draining = False
        self.open = 0

    def app(self) -> web.Application:
        """Return the application, with `guard` as its middleware."""
        raise NotImplementedError

    def generates(self, request: web.Request) -> bool:
        """Return whether a request generates text."""
        raise NotImplementedError

    def answered(self, request: web.Request, notes: dict[str, Any], status: int, seconds: float) -> None:
        """Note the end of a request, with 499 if the client has left, and what was noted of it."""

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count open requests, and answer errors of this server as other servers of this project answer theirs."""
        began, status = time.perf_counter(), GONE
        try:
            answer = await self._answer(request, handler)
            status = answer.status
            return answer
        finally:
            self.answered(request, cast(Client, request.protocol).notes, status, time.perf_counter() - began)

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        generates = self.generates(request)
        client = cast(Client, request.protocol)
        client.begin(request)
        self.open += 1
        try:
            if self.draining and generates:
                raise ApiError("the server is shutting down. Try another one", type="unavailable_error")
            if request.headers.get("Expect", "100-continue").lower() != "100-continue":
                raise web.HTTPExpectationFailed
            return await handler(request)
        except ClientLeft:
            return web.Response(status=GONE)
        except web.HTTPException as error:
            if error.status < 400:  # a redirection
                raise
            failed = ApiError(f"{error.reason}. Send a plain HTTP/1.1 request", status=error.status)
        except ApiError as error:
            failed = error.with_traceback(None)  # its frames hold what the request held
        finally:
            self.open -= 1
            client.end()
        client.notes["error"] = failed.type
        answer = errors.response(failed, request.method, request.path)
        # What is left of a body would be read as the next request.
        if not request.content.is_eof():
            answer.force_close()
        return answer

    async def end_connection(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let no client send another request on its connection, which would be lost, once this server is to end."""
        if self.draining:
            response.force_close()
            response.headers["Connection"] = "close"

    def may_ask(self, request: web.Request) -> bool:
        """Return whether a request has the key, if there is one."""
        named = request.headers.get("X-Api-Key", "")
        scheme, _, key = request.headers.get("Authorization", f"Bearer {named}").partition(" ")
        return not self._key or (scheme == "Bearer" and hmac.compare_digest(key.encode("utf-8", "replace"), self._key))


def check_origin(request: web.Request, hosts: list[str] | None, origins: frozenset[str]) -> None:
    """Raise ApiError for what a page of another site may send from a browser that can reach this address."""
    if not cors.is_trusted(request.headers.get("Host"), hosts):
        raise ApiError(cors.UNTRUSTED.format(shown(request.host)), type="permission_error")
    sent = map(request.headers.get, ("Origin", "Sec-Fetch-Site", "Host"))
    if request.method == "POST" and cors.crosses(origins, *sent):
        text = "requests of other sites are not allowed. Use a client other than a browser, or add the site to --cors-origins"
        raise ApiError(text, type="permission_error")
    # As for our servers, to which clients of the other routes name no type.
    if (kind := request.content_type) in SIMPLE and not request.path.startswith(("/api/", "/inference")):
        raise ApiError(
            f"the content type is {kind}, but must be JSON. Send 'Content-Type: application/json'", status=415
        )


async def expect(request: web.Request) -> None:
    """Leave an expectation to the handler: `receive` answers it once it wants the body."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket for an address, which listens later. As with gunicorn, `::` takes IPv4 as well."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def note(text: str) -> None:
    """Print a line for the person who started this process."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def fail(text: str, status: int = 2) -> NoReturn:
    """Exit with an error."""
    note(f"error: {text}")
    raise SystemExit(status)


async def serve(door: Door, sock: socket.socket, stop: asyncio.Event) -> None:
    """Serve until `stop`, with stdout for the access log; then refuse new requests, and end with the accepted ones."""
    service = door.service
    service.serves = not sys.stdout.isatty()
    service.access_log.start()
    sys.stdout = sys.stderr  # what a policy prints is no access log
    async with listening(door.app(), sock, within_open_files(door.limits)):
        await stop.wait()
        door.draining = True
        end = asyncio.get_running_loop().time() + service.config.request_timeout
        while door.open and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(PAUSE_SECONDS)
    service.access_log.flush()
