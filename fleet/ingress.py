"""The HTTP server in front of the replicas. It has all their routes, and a router chooses the replica that answers.

Requests about the whole fleet (health, statistics, metrics, a policy switch) go to every replica, and the answers are
combined. The routes of a single replica, such as its live page, are under `/replica/NAME/`. This module must not know
Ray: a `Fleet` names the replicas.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlencode

import aiohttp
from aiohttp import web

from fleet import bodies, connections, merged
from fleet.pool import Fleet, Replica
from fleet.relay import ClientLeft, Refused, Relay, error
from fleet.routers import Asked
from fleet.switched import Switched

BODY_SECONDS = 60.0  # to receive a body
PATIENCE_SECONDS = 15.0  # for which a request waits for a replica that can take it
PAUSE_SECONDS = 0.1
CHECK_SECONDS = 5.0  # for a replica's answer about itself
SEED_BITS = 63
GONE = 499  # for a client that has already left
NO_REPLICA = "no replica can take the request. Try again later"
OF_ONE = ("/events", "/load", "/what-if", "/stats/token_data.csv")
HEALTH = ("/health", "/healthz", "/ping", "/ready", "/health/ready")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Answers = dict[str, tuple[int, bytes, Mapping[str, str]]]  # status, body and headers by replica


class Ingress:
    """The routes; `draining` makes it refuse new requests."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.pool = fleet, fleet.pool
        self.draining = False
        self.open = 0
        self.switched = Switched()
        self.session: aiohttp.ClientSession

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=bodies.LARGEST, middlewares=[self._guard])
        app.cleanup_ctx.append(self._connections)
        app.router.add_get("/health/live", self.live)
        for path in HEALTH:
            app.router.add_get(path, self.health)
        app.router.add_get("/", self.home)
        app.router.add_get("/stats", self.stats)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/slots", self.slots)
        app.router.add_put("/policy", self.switch)
        app.router.add_route("*", "/requests/{id:.+}", self.find)
        app.router.add_route("*", "/replica/{name}/{path:.*}", self.one)
        for path in OF_ONE:
            app.router.add_route("*", path, self.of_one)
        app.router.add_route("*", "/{path:.*}", self.forward)
        return app

    async def _connections(self, app: web.Application) -> Any:
        self.session = connections.session()
        yield
        await self.session.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count open requests, and answer errors of this server as the replicas answer theirs."""
        if self.draining and bodies.generates(request.method, request.path):
            return await Relay(request, b"", self.session).fail("the server is shutting down. Try another one")
        self.open += 1
        try:
            return await handler(request)
        except ClientLeft:
            return web.Response(status=GONE)
        except web.HTTPRequestEntityTooLarge:
            text = f"the body is larger than {bodies.LARGEST:,} bytes. Send a shorter prompt"
            return web.json_response(error(request.path, text, "invalid_request_error"), status=413)
        except asyncio.TimeoutError:
            text = f"the body did not arrive within {BODY_SECONDS:g} s. Send it without pauses"
            return web.json_response(error(request.path, text, "timeout_error"), status=408)
        finally:
            self.open -= 1

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Answer by the replica that the router chooses, or by the next ones where it cannot."""
        body = await asyncio.wait_for(request.read(), BODY_SECONDS)
        asked = Asked()
        if bodies.generates(request.method, request.path):
            fields = bodies.read(body)
            asked = bodies.asked(request.path, fields, request.headers.get(bodies.SESSION, ""))
            body = bodies.seeded(request.path, body, fields, secrets.randbits(SEED_BITS))
        relay = Relay(request, body, self.session)
        end = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        while True:
            refused = Refused(None)
            for replica in await self.fleet.order(asked):
                self.pool.change(replica.name, +1)
                try:
                    await self.switched.tell(replica, self.session)
                    return await relay.attempt(replica)
                except Refused as no:
                    refused = no if no.answer or not refused.answer else refused
                    if not no.is_full:
                        self.pool.rest(replica.name)
                finally:  # also when the client has left: this task is cancelled, and so is the request there
                    self.pool.change(replica.name, -1)
            if refused.is_full or asyncio.get_running_loop().time() > end:
                return refused.answer or await relay.fail(NO_REPLICA)
            await asyncio.sleep(PAUSE_SECONDS)

    async def one(self, request: web.Request) -> web.StreamResponse:
        """Answer by the replica that the path names."""
        await self.fleet.refresh()
        known = self.pool.known.get(request.match_info["name"])
        if known is None:
            names = ", ".join(self.pool.known) or "none"
            text = f"replica {request.match_info['name']!r} does not exist. Use one of: {names}"
            return web.json_response(error("", text, "not_found_error"), status=404)
        path = request.rel_url.raw_path_qs.removeprefix(f"/replica/{known.replica.name}")
        relay = Relay(request, await asyncio.wait_for(request.read(), BODY_SECONDS), self.session, path)
        try:
            return await relay.attempt(known.replica)
        except Refused as refused:
            return refused.answer or await relay.fail("the replica does not answer. Try again later")

    async def of_one(self, request: web.Request) -> web.StreamResponse:
        """Name the replicas for what is not of the whole fleet."""
        await self.fleet.refresh()
        names = ", ".join(self.pool.known) or "none"
        text = f"{request.path} belongs to one replica. Use /replica/NAME{request.path} with one of: {names}"
        return web.json_response(error("", text, "invalid_request_error"), status=400)

    async def _everywhere(self, request: web.Request) -> Answers:
        """Send a request to all replicas; return status, body and headers of each, 503 for one that does not answer."""
        body = await asyncio.wait_for(request.read(), BODY_SECONDS)
        await self.fleet.refresh()
        replicas = [known.replica for known in self.pool.known.values()]

        async def ask(replica: Replica) -> tuple[int, bytes, Mapping[str, str]]:
            try:
                answer = await asyncio.wait_for(Relay(request, body, self.session).attempt(replica), CHECK_SECONDS)
            except Refused as refused:
                answer = refused.answer or web.json_response(error("", "no answer"), status=503)
            except asyncio.TimeoutError:
                answer = web.json_response(error("", f"no answer within {CHECK_SECONDS:g} s"), status=503)
            assert isinstance(answer, web.Response)
            return answer.status, bytes(answer.body or b""), answer.headers  # type: ignore[arg-type]

        answers = await asyncio.gather(*map(ask, replicas))
        return {replica.name: answer for replica, answer in zip(replicas, answers)}

    async def _merge(self, request: web.Request, merge: Callable[[dict[str, bytes]], web.Response]) -> web.Response:
        """Put the answers of all replicas together."""
        return self._merged(await self._everywhere(request), merge)

    def _merged(self, answers: Answers, merge: Callable[[dict[str, bytes]], web.Response]) -> web.Response:
        """Put answers together; where none succeeded, return the first one's, such as 401, but 404 if all have it."""
        passed = {name: body for name, (status, body, _) in answers.items() if status == 200}
        if passed:
            return merge(passed)
        for status, body, headers in sorted(answers.values(), key=lambda answer: answer[0] == 404):
            return web.Response(status=status, body=body, headers=headers)
        return web.json_response(error("", NO_REPLICA), status=503, headers={"Retry-After": "1"})

    async def stats(self, request: web.Request) -> web.Response:
        def merge(parts: dict[str, bytes]) -> web.Response:
            return web.json_response(merged.stats({name: json.loads(part) for name, part in parts.items()}))

        return await self._merge(request, merge)

    async def metrics(self, request: web.Request) -> web.Response:
        plain = request.clone(headers={**request.headers, "Accept": "text/plain"})  # not OpenMetrics

        def merge(parts: dict[str, bytes]) -> web.Response:
            text = merged.metrics({name: part.decode() for name, part in parts.items()}) + merged.own(self.pool)
            return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

        return await self._merge(plain, merge)

    async def slots(self, request: web.Request) -> web.Response:
        def merge(parts: dict[str, bytes]) -> web.Response:
            slots = {name: json.loads(part) for name, part in parts.items()}
            return web.json_response([{"replica": name, **slot} for name, some in slots.items() for slot in some])

        return await self._merge(request, merge)

    async def switch(self, request: web.Request) -> web.Response:
        """Switch the policy of all replicas, and of those that start later."""
        answers = await self._everywhere(request)
        told = [name for name, (status, *_) in answers.items() if status == 200]
        if told:
            self.switched.keep(await request.read(), request.headers, told)
        return self._merged(answers, _first)

    async def find(self, request: web.Request) -> web.Response:
        """Answer by the replica that knows the request."""
        return await self._merge(request, _first)

    async def live(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def health(self, request: web.Request) -> web.Response:
        answers = await self._everywhere(request)
        status, body = merged.health({name: (code, json.loads(text)) for name, (code, text, _) in answers.items()})
        if self.draining and "ready" in request.path:
            status, body["status"] = 503, "draining"
        return web.json_response(body, status=status, headers={"Retry-After": "1"} if status == 503 else None)

    async def home(self, request: web.Request) -> web.StreamResponse:
        """Show browsers the slots of all replicas side by side, and others the health."""
        if "text/html" not in request.headers.get("Accept", ""):
            return await self.health(request)
        await self.fleet.refresh()
        runs = urlencode([("run", f"replica/{name}") for name in self.pool.known], safe="/")
        raise web.HTTPFound(f"race?{runs}")


def _first(parts: Mapping[str, bytes]) -> web.Response:
    return web.Response(body=next(iter(parts.values())), content_type="application/json")


async def serve(ingress: Ingress, host: str, port: int, stop: asyncio.Event, drain_seconds: float) -> None:
    """Serve until `stop`; then refuse new requests, and end when the accepted ones are answered."""
    runner = web.AppRunner(ingress.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=2048).start()
        await stop.wait()
        ingress.draining = True
        end = asyncio.get_running_loop().time() + drain_seconds
        while ingress.open and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(PAUSE_SECONDS)
    finally:
        await runner.cleanup()
