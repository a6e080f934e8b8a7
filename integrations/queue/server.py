"""The queue: an HTTP server that holds requests for upstreams and lets them through in the order of a policy.

It is assembled of the same loop, records and pages as the server of this project; only the model is an `Upstream`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from aiohttp import web

from api.admin import operations, policy
from api.application import assemble, connect
from api.dialects import native
from api.hooks.admission import ID
from api.http import large
from api.http.deferral import App
from api.http.errors import ApiError
from api.pages import dashboard, events
from api.service import LoadedEngine, Service
from config import Config
from integrations.queue import access, health, looks, wire
from integrations.queue.bridge import Bridge
from integrations.queue.clients import Client
from integrations.queue.door import Door, check_origin, expect
from integrations.queue.hints import Allowance, Means, RequestHints, read_hints
from integrations.queue.menu import Menu, Shared
from integrations.queue.parsing import parse
from integrations.queue.receiving import Limits, Room, receive
from integrations.queue.relay import Relay, Wires, failed
from integrations.queue.sites import Sites
from integrations.queue.steps import StepsOfEach
from integrations.queue.upstreams import Upstreams
from integrations.queue.wire import OF_OWN, PASS_THROUGH, POSTS_THROUGH, QUEUED, STATES
from observe.replay import question
from observe.replay.recording import Recording
from observe.replay.what_if import WhatIf
from routing import bodies
from routing.routers import RoutingKey
from serving.inbox import MAX_RETRY_SECONDS
from serving.inference import Inference, InferenceError
from serving.places import Places

LARGEST = 32 << 20  # bytes of a body: prompts with pictures
PLACE = 8  # bytes of a token in a list
MOST_BEYOND = 1 << 16  # tokens of a prompt beyond its text that an upstream's count is believed to show


@dataclass(frozen=True)
class Settings:
    """The settings of a queue, beyond those of every server; keys are empty if there is none.

    `context` is the length of prompt and answer where a client names none; `client_tokens` per minute, 0 without limit.
    The requests that wait hold at most `waiting_bytes`.
    With `own`, all upstreams are servers of this project with one model, `title`, and may take each other's place.
    """

    key: str = ""
    idle: float = 300.0
    context: int = 4096
    client_by: str = "header"
    client_tokens: float = 0.0
    waiting_bytes: int = 256 << 20
    own: bool = False
    title: str = ""


class Silent:
    """Stands for the tokenizer, which only the upstream has."""

    vocab_size, longest_token = 1 << 32, 4
    bos_ids = eos_ids = special_ids = ()
    chat_template = tool_format = oldest_call = None


def _generates(*values: Any, **options: Any) -> NoReturn:
    raise InferenceError("invalid_request_error", "a queue generates no text itself. Send requests with ./eb load")


class Queue(Door):
    """The server. Its policy is switched to at the start, so that `dynamic` goes on if it ever fails.

    `on_death` is called with the reason if the loop fails nevertheless; all open requests have ended then.
    """

    def __init__(
        self, config: Config, sites: Sites, settings: Settings, on_death: Callable[[str], None] = lambda reason: None,
        limits: Limits | None = None,
    ) -> None:  # fmt: skip
        usual = Limits(config.receive_timeout, config.send_timeout, config.connections)
        super().__init__(limits or usual, config.api_key)
        self.sites, self.settings, self.menu = sites, settings, Shared() if settings.own else Menu()
        slots = sites.most
        config = dataclasses.replace(config, max_batch_size=slots)  # of a policy, for each upstream
        chosen = self.menu.get_policy(config.policy, slots, config.policy_options)
        self.manager = Upstreams(
            sites, max_queue=config.max_queue, max_queue_tokens=config.max_queue_tokens,
            max_tokens_per_step=1 << 40, make_policy=self.menu.get_policy, make_inference=_generates,
            on_death=on_death,
        )  # fmt: skip
        recording = Recording()
        questions = question.Server(
            self.manager, recording, served=config.policy, slots=slots, late=True, engines=self.manager.engines
        )
        self.manager.listeners.append(recording.on_arrival)
        self.manager.observers.append(StepsOfEach(recording.observe).observe)
        names = settings.title or " + ".join(site.name for site in sites.all)
        engine = LoadedEngine(
            model=self.manager.model, tokenizer=cast(Any, Silent()), model_name=names, device="upstream", dtype="", kv_dtype="",
            context=settings.context, vocabulary=1 << 32, width=0, n_pages=0, page_size=1, tokens_per_step=1 << 40,
            facts={"upstreams": self.manager.named}, manager=self.manager, make_inference=_generates, grammars=cast(Any, None),
            what_if=WhatIf(questions, settings.context),
        )  # fmt: skip
        self.service, self._hosts = Service(config, self.menu), config.hosts
        self.service.outage = lambda: health.state(self.sites.all)
        app = App("queue", static_folder=None)
        assemble(app, self.service, (native, operations, policy, events, dashboard))
        connect(self.service, engine)

        def changed() -> None:
            """Forget what earlier sets of upstreams served: a simulation has only the current ones."""
            engine.facts["upstreams"], questions.engines = self.manager.named, self.manager.engines
            recording.restart(time.perf_counter())

        self.manager.on_change = changed
        self.manager.start(self.menu.get_policy("dynamic", slots))
        if config.policy != "dynamic" or config.policy_options:
            self.manager.inbox.switch(chosen)
        self._bridge = Bridge(app)
        self._largest = bodies.LARGEST if settings.own else LARGEST
        self._room = Places(settings.waiting_bytes)  # for the bytes of bodies and prompts
        self._overhead = Means()  # tokens of prompts beyond their text, such as those of a chat template
        self._allowance = Allowance(settings.client_tokens, time.monotonic)
        self.wires: Wires

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(middlewares=[self.guard])
        app.cleanup_ctx.append(self._connections)
        app.on_response_prepare.append(self.end_connection)
        routes = {"/queue/position": self.position, "/upstreams": self.name_upstreams, "/{kind:upstream|replica}/{name}/{path:.*}": self.look,
                  "/{path:.*}": self.handle}  # fmt: skip
        for path, handler in routes.items():
            app.router.add_route("*", path, handler, expect_handler=expect)
        return app

    async def _connections(self, app: web.Application) -> AsyncIterator[None]:
        session = wire.session()
        key, own = self.settings.key, self.service.config.api_key
        self.wires = Wires(self.manager, self.sites, session, self.settings.idle, key, own)
        yield
        self.service.stop()
        await session.close()

    def answered(self, request: web.Request, notes: dict[str, Any], status: int, seconds: float) -> None:
        """Write a line of the access log; the pages' own hooks write theirs."""
        if "room" in notes:
            notes["room"].give_back()
        if self.service.config.access_log and self.service.serves and "is_page" not in notes:
            self.service.access_log.write(access.record(request, notes, status, seconds))

    def generates(self, request: web.Request) -> bool:
        """Return whether a request is queued."""
        return request.method == "POST" and (request.path in QUEUED or (self.settings.own and request.path == "/"))

    def _passes_through(self, method: str, path: str) -> bool:
        """Return whether an upstream answers a request without the queue."""
        if method in ("GET", "HEAD") and (path in PASS_THROUGH or path.startswith("/v1/models/")):
            return True
        return f"{method} {path}" in (POSTS_THROUGH | OF_OWN if self.settings.own else POSTS_THROUGH)

    async def on_page(self, request: web.Request, body: bytes) -> None:
        """Do what must happen before one of the server's own routes answers."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Queue a request, read from an upstream, or answer as the server of this project does."""
        path = request.rel_url.path
        if request.rel_url.raw_path != path or ".." in path:
            raise ApiError("this path is not plain. Send it without escapes and dots", type="not_found_error")
        if self.generates(request):
            self._check(request)
            return await self._queue(request)
        if self._passes_through(request.method, path):
            self._check(request)
            body = await receive(request, self.limits, self._largest, encoded=not self.settings.own)
            return await looks.look(self.wires, request, body, self.sites.all, request.rel_url.raw_path_qs)
        if f"{request.method} {path}" in self.service.generating or (path == "/load" and request.method == "POST"):
            text = f"a queue does not serve {request.method} {path}. Send load with ./eb load"
            raise ApiError(text, type="not_found_error")
        if path.startswith(("/v1/", "/api/")):
            text = f"{request.method} {path} is not passed on. Use POST with one of: {', '.join(sorted(QUEUED))}"
            raise ApiError(text, type="not_found_error")
        if path in (*operations.HEALTH, *operations.READY, "/"):
            await health.look(self.sites.all)
        body = await receive(request, self.limits)
        await self.on_page(request, body)
        self.service.draining = self.draining
        cast(Client, request.protocol).notes["is_page"] = True
        self.open -= 1  # an open page must not keep the queue from shutting down
        try:
            return await self._bridge.handle(request, body)
        finally:
            self.open += 1

    def _check(self, request: web.Request) -> None:
        """Refuse requests without the key, and those that other sites' pages send from a browser that can reach this address."""
        check_origin(request, self._hosts, self.service.config.origins)
        if not self.may_ask(request):
            text = "the API key is missing or wrong. Send the header 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'"
            raise ApiError(text, type="authentication_error")

    def _understand(self, request: web.Request, body: bytes) -> tuple[RequestHints, RoutingKey]:
        """Return what a request asks for, and what routers may know of it."""
        with large.serialize_large(len(body)):
            fields = parse(body)
            hints = read_hints(fields, request.headers, request.remote or "", self.settings.client_by)
            return hints, bodies.routing_key(fields, hints.session)

    async def _queue(self, request: web.Request) -> web.StreamResponse:
        """Hold a request until its turn, and answer it by an upstream."""
        is_own, notes = self.settings.own, cast(Client, request.protocol).notes
        room = notes["room"] = Room(self._room, 0)
        largest = min(self._largest, self._room.limit)
        body = await receive(request, self.limits, largest, encoded=not is_own, take=room.take)
        if len(body) <= large.LARGE:
            hints, key = self._understand(request, body)
        else:
            hints, key = await asyncio.to_thread(self._understand, request, body)
        room.take(PLACE * len(hints.prompt))
        if hints.choices > (slots := self.sites.most) and not is_own:
            raise ApiError(
                f"n is {hints.choices}, but no upstream takes more than {slots} at once. Use n up to {slots}"
            )
        meters, inference = self.service.meters, None
        notes["hints"] = hints._replace(prompt=[])
        status, rejected = 499, None
        meters.arrived()
        try:
            if (wait := self._allowance.wait(hints.client)) > 0:
                most, seconds = self.settings.client_tokens, math.ceil(wait)
                text = f"client {hints.client!r} has used its {most:,g} tokens per minute. Try again in {seconds} s"
                raise InferenceError("overloaded", text, seconds)
            relay = notes["relay"] = Relay(request, body, room, hints._replace(prompt=[]), key, self.wires)
            inference = self._inference(request, hints, relay, len(body))
            estimate, hints, body = len(hints.prompt), relay.hints, b""  # the relay lets go of its own
            relay.expect(inference)
            self._enqueue(inference)
            response = await relay.run()
            status = response.status
            if relay.prompt_tokens is not None:
                self._overhead.learn(hints.model, min(relay.prompt_tokens - estimate, MOST_BEYOND))
            is_known = relay.output_tokens or relay.prompt_tokens is not None  # not of an answer that cannot be read
            if is_known and relay.turn.ended in ("stop", "length"):
                self.manager.answers.learn(hints.model, max(1.0, relay.output_tokens / hints.choices))
            return response
        except InferenceError as error:
            if inference is not None:
                self.manager.forget(relay.turn)
            status, rejected = failed(error).status, "queue_full" if error.kind == "overloaded" else None
            raise failed(error) from None
        except ApiError as error:
            status = error.status
            raise
        finally:
            outputs = [] if inference is None else [relay.output_tokens]
            if inference is not None and inference.sequence.scheduled_at is not None:
                self._allowance.pay(hints.client, len(inference.sequence.prompt_ids) + outputs[0])
            meters.answered(request.path, status, rejected, 0, outputs, True)

    def _enqueue(self, inference: Inference) -> None:
        """Queue an inference. If the queue is full, tell the client how long the requests ahead of it take."""
        try:
            self.manager.enqueue_all([inference])
        except InferenceError as error:
            if error.kind == "overloaded":
                seconds = self.manager.before(inference.sequence)[1]
                error.retry_after = max(1, min(MAX_RETRY_SECONDS, math.ceil(seconds or 0.0)))
            raise

    def _inference(self, request: web.Request, hints: RequestHints, relay: Relay, size: int) -> Inference:
        """Return what waits in the queue for a request with a body of this size, the most tokens that its prompt can have."""
        prompt = [0] * round(min(self._overhead.of(hints.model), size - len(hints.prompt))) + hints.prompt
        limit = hints.limit or max(1, self.settings.context - len(prompt))
        name = request.headers.get("X-Request-Id", "")
        is_free = ID.fullmatch(name) and self.service.registry.find(name) is None
        inference = Inference(
            "", limit * hints.choices, prompt, id=name if is_free else uuid.uuid4().hex, client=hints.client,
            priority=hints.priority, session=hints.session, open_ended=hints.limit is None, deadline=hints.slo_s,
            call=self.service.programs.begin(hints.program, hints.session, hints.parent), on_end=relay.on_end,
        )  # fmt: skip
        inference.sequence.slots = hints.choices
        # For `adapter-affinity`: an upstream that swaps models serves the same one in a row.
        inference.sequence.adapter = hints.model
        return inference

    async def position(self, request: web.Request) -> web.Response:
        """Report how many requests are ahead of one in the policy's order, and about how many seconds they take."""
        self._check(request)
        id, waiting = request.query.get("id", ""), self.manager.queued
        seq = next((seq for seq in waiting if seq.id == id), None)
        before, seconds = ([], None) if seq is None else self.manager.before(seq)
        known = {"state": "waiting"} if seq is not None else self.service.registry.find(id)
        if known is None:
            text = f"request {id[:100]!r} is unknown. Use the X-Request-Id with which it was sent"
            raise ApiError(text, type="not_found_error")
        return web.json_response(
            {"id": id, "state": known["state"], "before": None if seq is None else len(before), "waiting": len(waiting), "policy": self.manager.policy_name,
             "expected_wait_s": None if seconds is None else round(seconds, 3)}
        )  # fmt: skip

    async def name_upstreams(self, request: web.Request) -> web.Response:
        """List the upstreams."""
        self._check(request)
        fields = ("name", "slots", "open", "refusals", "failures", "failing", "down_since")
        return web.json_response([{name: getattr(site, name) for name in fields} for site in self.sites.all])

    async def look(self, request: web.Request) -> web.StreamResponse:
        """Pass a GET on to one upstream, without the queue; other methods could change it or skip the queue."""
        self._check(request)
        site = next((site for site in self.sites.all if site.name == request.match_info["name"]), None)
        if site is None or request.method not in ("GET", "HEAD") or ".." in request.path:
            names = ", ".join(site.name for site in self.sites.all)
            text = f"only GET /upstream/NAME/PATH is passed on. Use one of these names: {names}"
            raise ApiError(text, type="not_found_error")
        path = "/" + request.match_info["path"]
        # The key of another's upstream also reads what clients must not see.
        if self.settings.key and not self.settings.own and path not in PASS_THROUGH | STATES:
            text = f"{path[:100]} is not read with the upstream's key. Use one of: {', '.join(sorted(PASS_THROUGH | STATES))}"
            raise ApiError(text, type="not_found_error")
        self.open -= 1  # as an open page of the queue itself
        try:
            body = await receive(request, self.limits)
            return await looks.look(
                self.wires, request, body, [site], "/" + request.rel_url.raw_path_qs.split("/", 3)[3]
            )
        finally:
            self.open += 1
