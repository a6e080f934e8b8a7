"""Answers requests by a WSGI app, in threads beside the event loop: the live page and the routes of operators.

This module must not know which app it is.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from aiohttp import web
from werkzeug.test import create_environ

from api.http.errors import ApiError
from integrations.queue.wire import HOP, to_client

THREADS = 64  # for open pages and questions
FULL = "too many pages are open. Close one, then try again"
Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Bridge:
    """A WSGI app with at most `THREADS` requests at once."""

    def __init__(self, app: Wsgi) -> None:
        self._app, self._open = app, 0
        self._threads = ThreadPoolExecutor(THREADS, "page")

    async def handle(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Return the app's answer, sent to the client as it comes."""
        if self._open >= THREADS:
            raise ApiError(FULL, type="unavailable_error")
        # Flask keeps the state of a request in context variables, which all threads that work on it must share.
        answer, context = _answer(self._app, _environ(request, body)), contextvars.copy_context()
        advance: Callable[[], Any] = partial(context.run, lambda: next(answer, b""))
        self._open += 1
        try:
            status, headers = await asyncio.wrap_future(step := self._threads.submit(advance))
            response = web.StreamResponse(status=status)
            for name, value in headers:
                if name.lower() not in HOP:
                    response.headers.add(name, value)
                elif name.lower() == "content-length":
                    response.content_length = int(value)
            await to_client(response.prepare(request))
            while piece := await asyncio.wrap_future(step := self._threads.submit(advance)):
                await to_client(response.write(piece))
            await to_client(response.write_eof())
            return response
        finally:
            self._open -= 1
            # If the client has left, a thread may still wait for the next piece.
            step.add_done_callback(lambda _: context.run(answer.close))


def _answer(app: Wsgi, environ: dict[str, Any]) -> Generator[Any, None, None]:
    """Yield the status and headers of an answer, and then its pieces."""
    head: list[Any] = []
    pieces = app(environ, lambda status, headers, info=None: head.extend((int(status.split()[0]), headers)))
    try:
        yield head
        yield from filter(None, pieces)
    finally:
        if (close := getattr(pieces, "close", None)) is not None:
            close()


def _environ(request: web.Request, body: bytes) -> dict[str, Any]:
    framing = ("content-length", "transfer-encoding")
    headers = [
        (name, value) for name, value in request.headers.items() if name.lower() not in framing and "_" not in name
    ]
    return create_environ(
        request.rel_url.path, query_string=request.rel_url.raw_query_string, method=request.method, headers=headers,
        data=body, environ_overrides={"REMOTE_ADDR": request.remote or ""}, multithread=True,
    )  # fmt: skip
