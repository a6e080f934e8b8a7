"""Requests that skip the queue: what an upstream reports, its models, or its live page."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import aiohttp
from aiohttp import web

from api.http.errors import ApiError
from integrations.queue.answers import STREAM
from integrations.queue.relay import Wires
from integrations.queue.sites import Site
from integrations.queue.wire import passed, to_client

ASK_SECONDS = 30.0  # for the head of an answer


async def look(wires: Wires, request: web.Request, body: bytes, sites: Sequence[Site], path: str) -> web.StreamResponse:
    """Pass a request on to the first of these upstreams that answers, and its answer to the client."""
    for site in sites:
        with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
            async with contextlib.AsyncExitStack() as stack:
                opening = wires.ask(request.method, site.url + path, wires.headers(request), body or None)
                answer = await asyncio.wait_for(stack.enter_async_context(opening), ASK_SECONDS)
                return await _copy(answer, request, wires.key)
    names = " nor ".join(site.name for site in sites) or "any upstream: there is none"
    raise ApiError(f"no answer from {names}. Start the upstream, or try again later", type="unavailable_error")


async def _copy(answer: aiohttp.ClientResponse, request: web.Request, secret: str) -> web.StreamResponse:
    """Copy an answer that may never end, such as a replica's events; if it breaks, events end and other answers break."""
    response = web.StreamResponse(status=answer.status, headers=passed(answer.headers, secret))
    if "Content-Length" in answer.headers:
        response.content_length = int(answer.headers["Content-Length"])
    await to_client(response.prepare(request))
    try:
        async for chunk in answer.content.iter_any():
            await to_client(response.write(chunk))
    except (aiohttp.ClientError, asyncio.TimeoutError):
        if answer.content_type != STREAM and request.transport is not None:
            request.transport.abort()
            return response
    await to_client(response.write_eof())
    return response
