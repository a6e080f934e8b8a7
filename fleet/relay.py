"""One client's request: tried at one replica after the other until the first token, and copied to the client.

A stream is copied in whole events, everything else in one piece, so that an attempt that breaks before the first token
leaves no trace and can be repeated elsewhere. This module must not know how replicas are chosen.
"""

from __future__ import annotations

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

KEPT_SECONDS = 30.0  # for which an idle connection to a replica is kept
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
        """Return the answer of a replica, sent as far as it is a stream; raise Refused before the first token."""
        headers = wire.passed(self.request.headers)  # with Host, which the replicas compare with --trusted-hosts
        url = URL(replica.url + self.path, encoded=True)
        try:
            async with self._session.request(
                self.method, url, data=self.body or None, headers=headers, allow_redirects=False
            ) as answer:
                if answer.content_type == "text/event-stream" and self.method != "HEAD":
                    return await self._copy(answer, replica.name)
                return await self._whole(answer, replica.name)
        except aiohttp.ClientError:
            if self._begun:
                generates = bodies.generates(self.method, self._route)
                return await (self.fail(BROKEN) if generates else self._end(b""))
            raise Refused(None) from None

    async def _whole(self, answer: aiohttp.ClientResponse, name: str) -> web.StreamResponse:
        body = await answer.read()
        headers = _headers(answer, name)
        if self.method == "HEAD" and "Content-Length" in answer.headers:
            headers["Content-Length"] = answer.headers["Content-Length"]
        response = web.Response(status=answer.status, reason=answer.reason, body=body, headers=headers)
        if refused := refusal(answer.status, body):
            refused.answer = response
            raise refused
        if self._stream is None:
            return response
        return await self._end(self._event(bodies.read(body)))  # an error after the head of a stream

    async def _copy(self, answer: aiohttp.ClientResponse, name: str) -> web.StreamResponse:
        rest = b""
        async for chunk in answer.content.iter_any():
            events, _, rest = (rest + chunk).rpartition(b"\n\n")
            if events:
                await self._send(events + b"\n\n", answer, name)
        if self._stream is None:
            raise Refused(None)
        return await self._end(rest)

    async def _send(self, events: bytes, answer: aiohttp.ClientResponse, name: str) -> None:
        if not self._begun:
            # Comments keep the connection alive and are no token: until the first one, another replica may answer.
            first = next((event for event in events.split(b"\n\n") if event and not event.startswith(b":")), b"")
            is_error = first.startswith((b'data: {"error"', b'data:{"error"', b"event: error"))
            if is_error and refusal(503, first.partition(b"data:")[2]):
                raise Refused(None)
            self._begun = bool(first)
        if self._stream is None:
            self._stream = web.StreamResponse(status=answer.status, headers=_headers(answer, name))
            if self.request.version < HttpVersion11:
                self._stream.force_close()  # its end shows only in that of the connection
            await wire.to_client(self._stream.prepare(self.request))
        await wire.to_client(self._stream.write(events))

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
