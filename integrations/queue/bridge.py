"""Answers requests by a WSGI app, each in a thread of its own: the live page and the routes of operators.

This module must not know which app it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Any

from aiohttp import web
from werkzeug.test import create_environ

from api.http.errors import ApiError
from integrations.queue.wire import HOP, to_client

THREADS = 64  # for open pages and questions
PIECES = 16  # of an answer that wait for its client
FULL = "too many pages are open. Close one, then try again"
Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Bridge:
    """A WSGI app with at most `THREADS` requests at once."""

    def __init__(self, app: Wsgi) -> None:
        self._app = app
        self._open = 0

    async def handle(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Return the app's answer, sent to the client as it comes."""
        if self._open >= THREADS:
            raise ApiError(FULL, type="unavailable_error")
        self._open += 1
        call = _Call(self._app, _environ(request, body))
        try:
            threading.Thread(target=call.run, name="page", daemon=True).start()
            return await call.answer(request)
        finally:
            self._open -= 1
            call.has_left.set()


class _Call:
    """One request: a thread puts the head and the pieces of its answer, and the event loop sends them."""

    def __init__(self, app: Wsgi, environ: dict[str, Any]) -> None:
        self._app, self._environ = app, environ
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Any] = asyncio.Queue()
        self._room = threading.Semaphore(PIECES)
        self.has_left = threading.Event()

    def _put(self, item: Any) -> None:
        while not self._room.acquire(timeout=1.0):
            if self.has_left.is_set():
                return
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, item)

    def run(self) -> None:
        head: list[Any] = []
        pieces: Iterable[bytes] = ()
        try:
            pieces = self._app(self._environ, lambda status, headers, info=None: head.extend((status, headers)))
            self._put((int(head[0].split()[0]), head[1]))
            for piece in pieces:
                if self.has_left.is_set():
                    break
                self._put(piece)
        finally:
            if (close := getattr(pieces, "close", None)) is not None:
                close()
            self._put(None)

    async def _next(self) -> Any:
        item = await self._pieces.get()
        self._room.release()
        return item

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if (first := await self._next()) is None:
            raise web.HTTPInternalServerError
        response = web.StreamResponse(status=first[0])
        for name, value in first[1]:
            if name.lower() not in HOP:
                response.headers.add(name, value)
            elif name.lower() == "content-length":
                response.content_length = int(value)
        await to_client(response.prepare(request))
        while (piece := await self._next()) is not None:
            await to_client(response.write(piece))
        await to_client(response.write_eof())
        return response


def _environ(request: web.Request, body: bytes) -> dict[str, Any]:
    framing = ("content-length", "transfer-encoding")
    headers = [
        (name, value) for name, value in request.headers.items() if name.lower() not in framing and "_" not in name
    ]
    return create_environ(
        request.rel_url.path, query_string=request.rel_url.raw_query_string, method=request.method, headers=headers,
        data=body, environ_overrides={"REMOTE_ADDR": request.remote or ""}, multithread=True,
    )  # fmt: skip
