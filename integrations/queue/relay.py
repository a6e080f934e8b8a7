"""One client's request: it waits for its turn, goes to an upstream, and its answer comes back byte for byte.

The loop decides whose turn it is. This module must not know policies.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import aiohttp
from aiohttp import HttpVersion11, web
from multidict import CIMultiDict
from yarl import URL

from api.http.errors import ApiError
from integrations.queue import answers, errors
from integrations.queue.counted import Counter
from integrations.queue.hints import HINTS, Means, RequestHints, hashed_key
from integrations.queue.receiving import Room
from integrations.queue.sites import EVERYONE, Site, Sites
from integrations.queue.upstream import Turn
from integrations.queue.upstreams import Upstreams
from integrations.queue.wire import CONNECT_SECONDS, REUSED, passed, to_client
from routing import bodies
from routing.routers import RoutingKey
from serving.inference import Inference, InferenceError

# Headers that carry a key of some vendor, or a session; Idempotency-Key is no secret.
SECRET = re.compile(r"cookie|auth|token|secret|credential|(api|access|subscription)[-_]?key", re.IGNORECASE)
PIECE = 1 << 14  # bytes of an answer that pass before others get a turn
STALE_SECONDS = 0.5  # a connection that breaks sooner was closed before it was used
GATEWAY = (502, 504)  # statuses that never are a request's fault
UNABLE = (501, 505)  # statuses that say nothing of other requests
LOCKED = (401, 403)  # statuses of a wrong key, which another upstream may take
LEFT = InferenceError("cancelled", "the client disconnected")
BROKE = InferenceError("server_error", "the upstream broke the connection, or sent no valid answer. Try again")
BROKEN = InferenceError("server_error", "the upstream failed in the middle of this answer. Send the request again")
CLOSED = InferenceError("unavailable_error", "the upstream refuses connections. Try again later", 1)
NO_REPLICA = InferenceError("unavailable_error", "no replica can take the request. Try again later", 1)
CUT = InferenceError("unavailable_error", "the replica failed in the middle of this answer. Send the request again")
PASSED_ON = InferenceError("invalid_request_error", "the upstream answered with an error, which was passed on")
ENDED = InferenceError("server_error", "the queue ended this request. Try again")


@dataclass(frozen=True)
class Wires:
    """What all requests share: the upstreams and the connections to them.

    `key` replaces the client's for the upstreams; `own_key` is the front's, which no upstream may see. `idle` is the
    longest silence of an upstream in seconds.
    """

    upstream: Upstreams
    sites: Sites
    session: aiohttp.ClientSession
    idle: float
    key: str = ""
    own_key: str = ""
    hidden: Means = field(default_factory=Means)

    def headers(self, request: web.BaseRequest) -> CIMultiDict[str]:
        """Return a request's headers for an upstream: without those of this connection, the hints and the front's key."""
        headers = passed(request.headers, self.own_key, HINTS | {"host"})
        if self.key or self.own_key:
            headers = CIMultiDict((name, value) for name, value in headers.items() if not SECRET.search(name))
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        return headers

    def whose(self, request: web.BaseRequest, model: str) -> str:
        """Return the key, as a hash, and the model to which a refusal may be due."""
        key = "" if self.key or self.own_key else hashed_key(request.headers)
        return EVERYONE if self.sites.usual else f"{key}:{model}"

    def ask(
        self, method: str, url: str, headers: CIMultiDict[str], body: bytes | None = None, notes: set[str] | None = None
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Return an upstream's answer, as a context; its redirects are not followed, and `notes` gets REUSED."""
        data = io.BytesIO(body) if body and len(body) > bodies.LARGEST else body  # aiohttp sends that in pieces
        return self.session.request(
            method, URL(url, encoded=True), data=data, headers=headers, allow_redirects=False, trace_request_ctx=notes,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=self.idle),
        )  # fmt: skip


def may_blame(status: int) -> bool:
    """Return whether an answer with this status may be an upstream's fault."""
    return status in LOCKED or (status >= 500 and status not in UNABLE)


def failed(error: InferenceError) -> ApiError:
    """Return the answer to a request that ended with an error; if the server failed, that was the upstream."""
    status = 502 if error.kind == "server_error" else None
    return ApiError(str(error), type=error.kind, status=status, retry_after=error.retry_after)


class Relay:
    """A request that is being queued, with its turn; raises ApiError where the front answers itself."""

    def __init__(
        self, request: web.Request, body: bytes, room: Room, hints: RequestHints, key: RoutingKey, wires: Wires
    ):
        self.request, self.body, self.hints, self._routing_key = request, body, hints, key
        self._room, self._size = room, len(body)
        self.reported_tokens: int | None = None  # as the upstream counts them, where fewer are believed
        self.prompt_tokens: int | None = None  # as the upstream counts them, if it says
        self.output_tokens = 0  # that have come; the loop may not have seen the last ones yet
        self._wires = wires
        self._loop = asyncio.get_running_loop()
        self._wakeup = asyncio.Event()
        self._answer: aiohttp.ClientResponse | None = None
        self._attempting: asyncio.Task[None] | None = None
        self._blame_doubted: Callable[[], None] | None = None  # after an error that may be this request's fault
        self.turn: Turn

    def expect(self, inference: Inference) -> None:
        """Take the inference that waits in the queue for this request."""
        whose = self._wires.whose(self.request, self.hints.model)
        self.turn = Turn(inference, lambda: self._from_loop(self._wakeup.set), self._routing_key, whose)
        self._wires.upstream.expect(self.turn)

    def on_end(self) -> None:
        """Note that the inference has ended, in the thread that ended it."""
        self._wires.upstream.forget(self.turn)
        seq = self.turn.inference.sequence  # others may know it for long, but from now on only the length of its prompt
        seq.prompt_ids = cast(Any, range(len(seq.prompt_ids)))
        self._from_loop(self._on_end)

    def _from_loop(self, act: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # this server's event loop has ended
            self._loop.call_soon_threadsafe(act)

    def _on_end(self) -> None:
        self._wakeup.set()
        if self.turn.inference.error is None:
            return
        if self._answer is not None:  # its deadline has passed, or an operator cancelled it
            self._answer.close()
        elif self._attempting is not None:  # nothing has come yet
            self._attempting.cancel()

    async def run(self) -> web.StreamResponse:
        """Return the answer, sent to the client as far as it has come."""
        try:
            while True:
                await self._wakeup.wait()
                self._wakeup.clear()
                if self.turn.inference.is_finished:
                    raise failed(self.turn.inference.error or ENDED)
                if (answer := await self._attempt()) is not None:
                    return answer
        finally:  # also when the client has left: this task is cancelled then
            self.body = b""
            if self.turn.ended is None:
                self.turn.inference.cancel(LEFT)

    async def _attempt(self) -> web.StreamResponse | None:
        """Return an upstream's answer; None if none takes it now, and it waits for its next turn."""
        site, now = self.turn.at.site, self._loop.time()
        site.open += 1
        self._attempting = asyncio.current_task()
        try:
            while True:
                notes: set[str] = set()
                try:
                    return await self._exchange(site, notes)
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                    # An upstream closes an idle connection at the moment in which it is used again: nothing was computed.
                    was_idle = REUSED in notes and self._loop.time() - now < STALE_SECONDS
                    if not was_idle or self._answer is not None or self.turn.inference.error is not None:
                        raise
        except asyncio.CancelledError:
            if (ended := self.turn.inference.error) is None:  # the client has left
                raise
            raise failed(ended) from None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            is_closed = isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))
            if is_closed:
                site.down_since = site.down_since or time.time()
            # Nothing has reached it, or it is a replica of ours: nothing is done twice.
            may_stay = is_closed or site.own
            if self._blame(site, error, is_closed=is_closed) and self._put_back(site, may_stay):
                return None
            other = NO_REPLICA if site.own else BROKE
            reason = self.turn.inference.error or (CLOSED if is_closed else self._reason(error, other))
            self._wires.upstream.end(self.turn, "abort", reason)
            raise failed(reason) from None
        finally:
            site.open -= 1
            self._attempting = None

    def _blame(self, site: Site, error: Exception, *, is_closed: bool = False) -> bool:
        """Count an error against an upstream; return False if it is not at fault: it serves others, or we ended the request."""
        is_silent = isinstance(error, asyncio.TimeoutError) and not is_closed
        serves = is_silent and not site.own and self._loop.time() - site.heard_at < self._wires.idle / 2
        if serves or self.turn.inference.error is not None:
            return False
        if site.own:
            site.failures += 1
            self._refuse({})
        else:
            why = "refuses connections" if is_closed else "is silent" if is_silent else "breaks connections"
            is_cut = self._answer is not None
            self._wires.sites.fail(site, self.turn.rest, why, at_once=is_closed or is_silent, is_cut=is_cut)
        return True

    def _refuse(self, headers: Mapping[str, str]) -> None:
        self.turn.refused_at = min(self.turn.refused_at, self._wires.sites.clock())
        self._wires.sites.refuse(self.turn.at.site, self.turn.whose, self.turn.rest, headers)

    def _put_back(self, site: Site, may_stay: bool) -> bool:
        """Let the request wait once more, for another upstream unless it `may_stay`; return False if it has waited enough.

        What an upstream may have computed goes to each other one at most once.
        """
        turn, sites = self.turn, self._wires.sites.all
        if not may_stay:
            turn.tried.add(site.name)
        others = (one for one in sites if one.name not in turn.tried and one.slots >= turn.inference.sequence.slots)
        if not (may_stay or any(others)) or not self._wires.upstream.is_patient(turn):
            return False
        self._answer = None
        self._wires.upstream.put_back(turn)
        return True

    def _reason(self, error: Exception, other: InferenceError) -> InferenceError:
        silent = (
            f"the upstream sent nothing for {self._wires.idle:g} s. Send the request again, or raise --idle-timeout"
        )
        return InferenceError("timeout_error", silent) if isinstance(error, asyncio.TimeoutError) else other

    async def _exchange(self, site: Site, notes: set[str]) -> web.StreamResponse | None:
        headers = self._wires.headers(self.request)
        if self.hints.streams:
            headers["Accept-Encoding"] = "identity"  # tokens cannot be counted in compressed bytes
        if site.own:
            headers["X-Request-Id"] = self.turn.inference.id
        url = site.url + self.request.rel_url.raw_path_qs
        async with self._wires.ask(self.request.method, url, headers, self.body, notes) as answer:
            site.down_since, site.heard_at = None, self._loop.time()
            if answer.status < 200:
                raise aiohttp.ClientPayloadError("no answer")
            refusals = answers.REFUSALS if site.own else (429, 503)
            if answer.status in refusals and (not site.own or answers.is_refusal(await answer.read())):
                self._refuse({} if site.own else answer.headers)
                if self._put_back(site, may_stay=True):
                    return None
            elif may_blame(answer.status) and not site.own:
                sites, rest = self._wires.sites, self.turn.rest
                blame = partial(sites.fail, site, rest, f"answers {answer.status}")
                if answer.status in LOCKED and not self._wires.key:  # it may be wrong for this key alone
                    blame = partial(sites.refuse, site, self.turn.whose, rest, {})
                if answer.status in GATEWAY:
                    blame()
                elif self._blame_doubted is None:
                    self._blame_doubted = blame
                if self._put_back(site, may_stay=False):
                    return None
            else:
                self._wires.upstream.accept(self.turn)
                if self._blame_doubted is not None:  # it was at fault, as this one answers the same request
                    self._blame_doubted()
            self._answer = answer
            return await self._copy(answer, site)

    async def _copy(self, answer: aiohttp.ClientResponse, site: Site) -> web.StreamResponse:
        """Pass an answer on as it comes, and count what is in it."""
        is_plain = answer.headers.get("Content-Encoding", "identity").lower() == "identity"
        hidden, model = self._wires.hidden, self.hints.model
        counter = Counter(answer.content_type if is_plain else "", answer.status, hidden.of(model))
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=self._head(answer, site))
        if "Content-Length" in answer.headers:
            response.content_length = int(answer.headers["Content-Length"])
        if self.request.version < HttpVersion11:
            response.force_close()  # its end shows only in that of the connection
        upstream, turn = self._wires.upstream, self.turn
        try:
            async for chunk in answers.pieces(answer) if site.own else answer.content.iter_chunked(PIECE):
                site.heard_at = self._loop.time()
                if len(chunk) == PIECE:  # more may be there already, and counting takes a while
                    await asyncio.sleep(0)
                if not response.prepared:
                    await to_client(response.prepare(self.request))
                    self.body = b""  # no upstream needs it any more
                    self._room.give_back()
                if count := counter.feed(chunk):
                    self.output_tokens = counter.tokens
                    upstream.tokens(turn, count)
                await to_client(response.write(chunk))
            if answer.status == 200 and not response.prepared:  # no route that is queued answers with nothing
                raise aiohttp.ClientPayloadError
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            if not response.prepared:
                raise
            self._blame(site, error)
            other = CUT if site.own else BROKEN
            return await self._break(response, counter, turn.inference.error or self._reason(error, other))
        if not response.prepared:
            await to_client(response.prepare(self.request))
        if count := counter.end():
            upstream.tokens(turn, count)
        self.output_tokens, prompt = counter.tokens, counter.prompt_tokens
        self.reported_tokens = counter.reported if counter.reported and counter.reported > counter.tokens else None
        if prompt is not None and 0 <= prompt <= self._size:  # a token has at least a byte
            self.prompt_tokens = prompt
        if counter.hidden is not None:
            hidden.learn(model, counter.hidden)
        if answer.status < 500 and answer.status != 429 and not may_blame(answer.status):
            upstream.accept(turn, is_whole=True)
        if counter.is_error and not counter.tokens:
            upstream.end(turn, "abort", PASSED_ON)
        else:
            upstream.end(turn, "length" if counter.reason in ("length", "max_tokens") else "stop")
        await to_client(response.write_eof())
        return response

    def _head(self, answer: aiohttp.ClientResponse, site: Site) -> CIMultiDict[str]:
        seq, headers = self.turn.inference.sequence, passed(answer.headers, self._wires.key)
        waited = self.turn.begun_at - seq.arrived_at
        headers.update({"X-Request-Id": seq.id, "X-Upstream": site.name, "X-Queue-Wait": f"{waited:.4f}"})
        return headers

    async def _break(self, response: web.StreamResponse, counter: Counter, error: InferenceError) -> web.StreamResponse:
        """End an answer whose upstream failed: a stream with an error event, any other by breaking the connection."""
        self._wires.upstream.end(self.turn, "abort", error)
        if counter.is_stream and response.content_length is None:
            failure = failed(error), self.request.method, self.request.path
            if response.content_type == answers.STREAM:  # of ours, no half event has passed
                last = b"\n\n" * (not self.turn.at.site.own) + errors.event(*failure)
            else:
                last = b"\n" + json.dumps(errors.content(*failure)[1]).encode() + b"\n"
            await to_client(response.write(last))
            await to_client(response.write_eof())
        elif self.request.transport is not None:
            self.request.transport.abort()  # so that the client cannot mistake the answer for a complete one
        return response
