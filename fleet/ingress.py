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

from fleet import bodies, merged
from fleet.pool import Fleet, Replica
from fleet.relay import Refused, Relay
from fleet.routers import Asked
from fleet.switched import Switched
from front import errors, wire
from front.door import PAUSE_SECONDS, Door, expect
from front.errors import Failed, unavailable
from front.limits import Limits
from front.receiving import receive

PATIENCE_SECONDS = 15.0  # for which a request waits for a replica that can take it
CHECK_SECONDS = 5.0  # for a replica's answer about itself
SEED_BITS = 63
NO_REPLICA = "no replica can take the request. Try again later"
OF_ONE = ("/events", "/load", "/what-if", "/stats/token_data.csv")
HEALTH = ("/health", "/healthz", "/ping", "/ready", "/health/ready")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Answers = dict[str, tuple[int, bytes, Mapping[str, str]]]  # status, body and headers by replica


class Ingress(Door):
    """The routes. The replicas check the key; the ingress knows it only to refuse requests without it early.

    `hosts` are the names by which clients may call it; None allows any.
    """

    def __init__(self, fleet: Fleet, limits: Limits, key: str = "", hosts: list[str] | None = None) -> None:
        super().__init__(limits, key)
        self.hosts = hosts
        self.fleet, self.pool = fleet, fleet.pool
        self.switched = Switched()
        self.session: aiohttp.ClientSession

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(middlewares=[self.guard])
        app.cleanup_ctx.append(self._connections)
        of_all = {
            "/health/live": self.live, **dict.fromkeys(HEALTH, self.health), "/": self.home, "/stats": self.stats,
            "/metrics": self.metrics, "/slots": self.slots,
        }  # fmt: skip
        for path, handler in of_all.items():
            for method in ("GET", "HEAD"):
                app.router.add_route(method, path, handler, expect_handler=expect)
        app.router.add_route("PUT", "/policy", self.switch, expect_handler=expect)
        others = {"/requests/{id:.+}": self.find, "/replica/{name}/{path:.*}": self.one}
        others |= {**dict.fromkeys(OF_ONE, self.of_one), "/{path:.*}": self.forward}
        for path, handler in others.items():
            app.router.add_route("*", path, handler, expect_handler=expect)
        return app

    async def _connections(self, app: web.Application) -> Any:
        self.session = wire.session()
        yield
        await self.session.close()

    async def _body(self, request: web.Request) -> bytes:
        """Return the body of a request; b"" without the key, since a replica refuses it in its own words anyway."""
        if not wire.is_for(request, self.hosts):
            text = (
                f"the Host header is {request.host[:100]!r}, which is not in --trusted-hosts. Use a name from that list"
            )
            raise Failed(400, text)
        return await receive(request, self.limits) if self.may_ask(request) else b""

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Answer by the replica that the router chooses, or by the next ones where it cannot."""
        body = await self._body(request)
        asked = Asked()
        if bodies.generates(request.method, request.path):
            fields = bodies.read(body)
            asked = bodies.asked(request.path, fields, request.headers.get(bodies.SESSION, ""))
            body = bodies.seeded(request.path, body, fields, secrets.randbits(SEED_BITS))
        relay = Relay(request, body, self.session)
        end = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        while True:
            refused = Refused(None)
            for replica in await self.fleet.choose(asked):
                # Counted before anything is awaited, so that a request that is routed next sees this one.
                self.pool.change(replica.name, +1)
                try:
                    # A replica that started after a switch must not answer its first request under the old policy.
                    await self.switched.tell(replica, self.session)
                    return await relay.attempt(replica)
                except Refused as no:
                    refused = no if no.answer or not refused.answer else refused
                    # A full replica is well: only its queue is long, which the router sees in its load.
                    if not no.is_full:
                        self.pool.rest(replica.name)
                finally:
                    # Also when the client has left: this task is cancelled, and so is the request there.
                    self.pool.change(replica.name, -1)
            if refused.is_full or asyncio.get_running_loop().time() > end:
                return refused.answer or await relay.fail(NO_REPLICA)
            await asyncio.sleep(PAUSE_SECONDS)

    async def one(self, request: web.Request) -> web.StreamResponse:
        """Answer by the replica that the path names."""
        await self.fleet.choose()
        known = self.pool.known.get(request.match_info["name"])
        if known is None:
            return await self._name_replicas(
                request, 404, f"replica {request.match_info['name']!r} does not exist. Use"
            )
        path = "/" + request.rel_url.raw_path_qs.split("/", 3)[3]
        relay = Relay(request, await self._body(request), self.session, path)
        try:
            return await relay.attempt(known.replica)
        except Refused as refused:
            return refused.answer or await relay.fail("the replica does not answer. Try again later")

    async def of_one(self, request: web.Request) -> web.StreamResponse:
        """Refuse what is not of the whole fleet."""
        await self.fleet.choose()
        text = f"{request.path} belongs to one replica. Use /replica/NAME{request.path} with"
        return await self._name_replicas(request, 400, text)

    async def _name_replicas(self, request: web.Request, status: int, text: str) -> web.StreamResponse:
        """Raise an error with the names of the replicas; without the key, let one of them refuse the request."""
        if not self.may_ask(request):
            return await self.forward(request)
        type = "not_found_error" if status == 404 else "invalid_request_error"
        raise Failed(status, f"{text} one of: {', '.join(self.pool.known) or 'none'}", type)

    async def _everywhere(self, request: web.Request, body: bytes) -> Answers:
        """Send a request to all replicas; return status, body and headers of each, 503 for one that does not answer."""
        await self.fleet.choose()
        replicas = [known.replica for known in self.pool.known.values()]
        method = "GET" if request.method == "HEAD" else request.method  # bodies are put together

        async def ask(replica: Replica) -> tuple[int, bytes, Mapping[str, str]]:
            relay = Relay(request, body, self.session, method=method)
            try:
                answer = await asyncio.wait_for(relay.whole(replica), CHECK_SECONDS)
            except Refused:
                answer = errors.response(unavailable("no answer"))
            except asyncio.TimeoutError:
                answer = errors.response(unavailable(f"no answer within {CHECK_SECONDS:g} s"))
            return answer.status, bytes(answer.body or b""), answer.headers  # type: ignore[arg-type]

        answers = await asyncio.gather(*map(ask, replicas))
        return {replica.name: answer for replica, answer in zip(replicas, answers)}

    async def _merge(self, request: web.Request, merge: Callable[[dict[str, bytes]], web.Response]) -> web.Response:
        """Put the answers of all replicas together."""
        return self._merged(await self._everywhere(request, await self._body(request)), merge)

    def _merged(self, answers: Answers, merge: Callable[[dict[str, bytes]], web.Response]) -> web.Response:
        """Put answers together; where none succeeded, return the first one's, such as 401, but 404 if all have it."""
        passed = {name: body for name, (status, body, _) in answers.items() if status == 200}
        if passed:
            return merge(passed)
        for status, body, headers in sorted(answers.values(), key=lambda answer: answer[0] == 404):
            return web.Response(status=status, body=body, headers=headers)
        return errors.response(unavailable(NO_REPLICA))

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
        body = await self._body(request)
        answers = await self._everywhere(request, body)
        told = [name for name, (status, *_) in answers.items() if status == 200]
        if told:
            self.switched.keep(body, request.headers, told)
        return self._merged(answers, _first)

    async def find(self, request: web.Request) -> web.Response:
        """Answer by the replica that knows the request."""
        return await self._merge(request, _first)

    async def live(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def health(self, request: web.Request) -> web.Response:
        answers = await self._everywhere(request, b"")
        if answers and all(400 <= status < 500 for status, *_ in answers.values()):  # the request is at fault
            return self._merged(answers, _first)
        status, body = merged.health({name: (code, bodies.read(text)) for name, (code, text, _) in answers.items()})
        if self.draining and "ready" in request.path:
            status, body["status"] = 503, "draining"
        return web.json_response(body, status=status, headers={"Retry-After": "1"} if status == 503 else None)

    async def home(self, request: web.Request) -> web.StreamResponse:
        """Show browsers the slots of all replicas side by side, and others the health."""
        if "text/html" not in request.headers.get("Accept", ""):
            return await self.health(request)
        await self.fleet.choose()
        runs = urlencode([("run", f"replica/{name}") for name in self.pool.known], safe="/")
        raise web.HTTPFound(f"race?{runs}")


def _first(parts: Mapping[str, bytes]) -> web.Response:
    return web.Response(body=next(iter(parts.values())), content_type="application/json")
