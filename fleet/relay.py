"""One client's request: tried at one replica after the other until the first token, and copied to the client.

A stream is copied in whole events, everything else as it comes, so that an attempt that breaks before the first token leaves
no trace and can be repeated elsewhere. This module must not know how replicas are chosen.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp import HttpVersion11, web
from multidict import CIMultiDict
from yarl import URL

from fleet import bodies
from fleet.pool import Replica
from front import errors, wire

REFUSALS = (429, 503, 529)  # statuses with which a replica may refuse
STREAM = "text/event-stream"
REPLICA = "X-Replica"  # the header of an answer that names the replica
BROKEN = "the replica failed in the middle of this answer. Send the request again"


class Refused(Exception):
    """A replica did not take the request: it is full, going away, or broke the connection before the first token."""

    def __init__(self, answer: web.Response | None, is_full: bool = False) -> None:
        super().__init__()
        self.answer = answer  # its own words, if it had any
        self.is_full = is_full  # rather than going away


def refusal(status: int, body: bytes) -> Refused | None:
    """Return what an answer means if another replica may give a better one."""
    if status not in (429, 503, 529):
        return None
    fields = bodies.read(body)
    error = fields.get("error")
    inner = error if isinstance(error, dict) else {"type": fields.get("error_type")}
    kind = inner.get("type")
    if kind in ("overloaded", "rate_limit_error"):
        return Refused(None, is_full=True)
    if "details" in inner:  # Anthropic's form: too large for the memory of any replica
        return None
    return Refused(None) if kind in ("unavailable_error", "healthcheck", "overloaded_error") else None


class Relay:
    """A request with its answer to the client, which may come from several replicas until its first token."""

    def __init__(
        self, request: web.Request, body: bytes, session: aiohttp.ClientSession, path: str = "", method: str = ""
    ) -> None:
        self.request, self.body = request, body
        self.path, self.method = path or request.rel_url.raw_path_qs, method or request.method
        self._route = self.path.partition("?")[0]
        self._session = session
        self._stream: web.StreamResponse | None = None  # whose head has been sent
        self._begun = False  # a token has been sent

    async def attempt(self, replica: Replica) -> web.StreamResponse:
        """Return the answer of a replica, sent to the client as it comes; raise Refused before its first token."""
        try:
            async with self._ask(replica) as answer:
                # After the head of a stream, whose first try ended without a token, only an event can tell an error.
                if answer.status in REFUSALS or (self._stream is not None and answer.content_type != STREAM):
                    return await self._refused(await _read(answer, replica.name))
                return await self._copy(answer, replica.name)
        except aiohttp.ClientError:
            if not self._begun:
                raise Refused(None) from None
            assert self._stream is not None
            if self._stream.content_type == STREAM:
                generates = bodies.generates(self.method, self._route)
                return await (self.fail(BROKEN) if generates else self._end(b""))
            if self.request.transport is not None:
                self.request.transport.abort()  # so that the client cannot mistake the answer for a complete one
            return self._stream

    async def whole(self, replica: Replica) -> web.Response:
        """Return the answer of a replica in one piece; raise Refused if there is none."""
        try:
            async with self._ask(replica) as answer:
                return await _read(answer, replica.name)
        except aiohttp.ClientError:
            raise Refused(None) from None

    def _ask(self, replica: Replica) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        headers = wire.passed(self.request.headers)
        headers.popall("Host", None)
        url = URL(replica.url + self.path, encoded=True)
        return self._session.request(self.method, url, data=self.body or None, headers=headers, allow_redirects=False)

    async def _refused(self, response: web.Response) -> web.StreamResponse:
        body = bytes(response.body or b"")  # type: ignore[arg-type]
        if refused := refusal(response.status, body):
            refused.answer = response
            raise refused
        if self._stream is None:
            return response
        return await self._end(self._event(bodies.read(body)))

    async def _copy(self, answer: aiohttp.ClientResponse, name: str) -> web.StreamResponse:
        """Copy an answer: a stream in whole events, any other as it comes."""
        rest, is_stream = b"", answer.content_type == STREAM
        async for chunk in answer.content.iter_any():
            ready, _, rest = (rest + chunk).rpartition(b"\n\n") if is_stream else (chunk, b"", b"")
            if ready:
                await self._send(ready + b"\n\n" if is_stream else ready, answer, name)
        if self._stream is None:
            if is_stream and self.method != "HEAD":
                raise Refused(None)
            await self._begin(answer, name)
        return await self._end(rest)

    async def _send(self, data: bytes, answer: aiohttp.ClientResponse, name: str) -> None:
        if not self._begun:
            # Comments keep the connection alive and are no token: until the first one, another replica may answer.
            first = next((event for event in data.split(b"\n\n") if event and not event.startswith(b":")), b"")
            is_error = first.startswith((b'data: {"error"', b'data:{"error"', b"event: error"))
            if is_error and refusal(503, first.partition(b"data:")[2]):
                raise Refused(None)
            self._begun = bool(first)
        if self._stream is None:
            await self._begin(answer, name)
        assert self._stream is not None
        await wire.to_client(self._stream.write(data))

    async def _begin(self, answer: aiohttp.ClientResponse, name: str) -> None:
        self._stream = web.StreamResponse(status=answer.status, reason=answer.reason, headers=_headers(answer, name))
        if "Content-Length" in answer.headers:
            self._stream.content_length = int(answer.headers["Content-Length"])
        if self.request.version < HttpVersion11:
            self._stream.force_close()  # its end shows only in that of the connection
        await wire.to_client(self._stream.prepare(self.request))

    async def _end(self, data: bytes) -> web.StreamResponse:
        assert self._stream is not None
        if data:
            await wire.to_client(self._stream.write(data))
        await wire.to_client(self._stream.write_eof())
        return self._stream

    async def fail(self, message: str) -> web.StreamResponse:
        """End the answer with an error: the last event of a stream, or 503."""
        failed = errors.unavailable(message)
        if self._stream is None:
            return errors.response(failed, self.method, self._route)
        return await self._end(self._event(errors.content(failed, bodies.dialect(self.method, self._route))))

    def _event(self, content: Mapping[str, Any]) -> bytes:
        dialect = bodies.dialect(self.method, self._route)
        head = {"tgi": "data:", "messages": "event: error\ndata: "}.get(dialect, "data: ")
        return f"{head}{json.dumps(content, separators=(',', ':'))}\n\n".encode()


def _headers(answer: aiohttp.ClientResponse, name: str) -> CIMultiDict[str]:
    headers = wire.passed(answer.headers)
    headers[REPLICA] = name
    return headers


async def _read(answer: aiohttp.ClientResponse, name: str) -> web.Response:
    body = await answer.read()
    return web.Response(status=answer.status, reason=answer.reason, body=body, headers=_headers(answer, name))
