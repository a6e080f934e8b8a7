"""The queue in front of a fleet's replicas: their list, their reports, and the policy that all of them run.

This module must not know Ray: a `Source` names the replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import aiohttp
from aiohttp import web

from integrations.queue.menu import divided
from integrations.queue.parsing import parse
from integrations.queue.server import Queue, Settings
from integrations.queue.sites import Site, Sites
from integrations.ray.options import Plan
from routing.autoscalers import Load

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two lists of the replicas
GLANCE_SECONDS = 0.1  # between two checks for one that has failed
SWITCH_SECONDS = 5.0  # for a replica's answer to a switch
SPARE_SECONDS = 60.0  # a replica is silent for longer than its own time limit only if it hangs


class Found(NamedTuple):
    """A replica: its lasting name, the address of its server, and its last report, the fields of `Load`; {} before one."""

    name: str
    url: str
    report: Mapping[str, Any]


class Source(Protocol):
    """Where replicas come from."""

    async def find(self) -> Iterable[Found]:
        """Return the replicas that can take requests."""

    def report(self, waiting: Load) -> None:
        """Report to the autoscaler which requests wait in the queue, where no replica sees them."""


class FleetQueue(Queue):
    """A queue whose upstreams are the replicas that `source` finds.

    A replica gets one request more than its slots, which keeps it busy while the next one is on its way.
    """

    def __init__(self, plan: Plan, source: Source, on_death: Callable[[str], None] = lambda reason: None) -> None:
        config = plan.config
        settings = Settings(config.api_key, config.request_timeout + SPARE_SECONDS, own=True, title=config.model)
        sites = Sites([], plan.router, usual=config.max_batch_size + 1)
        super().__init__(config, sites, settings, on_death, plan.limits)
        self._source = source
        self._known: dict[str, Site] = {}
        self._switch: dict[str, Any] = {}  # the last one, for replicas that start later
        self._switched: set[str] = set()  # the replicas that have carried it out

    async def _connections(self, app: web.Application) -> AsyncIterator[None]:
        async for _ in super()._connections(app):
            following = asyncio.create_task(self._follow())
            yield
            following.cancel()

    async def _follow(self) -> None:
        """Find the replicas once a second, and at once when one has failed."""
        while True:
            try:
                await self.refresh()
            except Exception:  # of the source; the replicas that are known serve on
                log.exception("cannot find the replicas")
            failures, end = self._failures, asyncio.get_running_loop().time() + LOOK_SECONDS
            while failures == self._failures and asyncio.get_running_loop().time() < end:
                await asyncio.sleep(GLANCE_SECONDS)

    @property
    def _failures(self) -> int:
        return sum(site.failures + site.refusals for site in self.sites.all)

    async def refresh(self) -> None:
        """List the replicas, and use those that run the policy of the last switch."""
        found = {}
        for name, url, report in await self._source.find():
            site = found[name] = self._known.get(name) or Site(name, url, 0, own=True)
            site.kv_free = 1.0 - report.get("kv_used", 0.0)
            site.prefill_tokens = int(report.get("prefill_tokens", 0))
            site.slots = min(int(report.get("slots") or self.sites.usual) + 1, self.sites.usual)
        self._known = found
        self._switched &= found.keys()  # one that comes back under its name may be another server
        await self._switch_all()
        self._source.report(self._waiting())

    async def _switch_all(self) -> None:
        if self._switch:
            await asyncio.gather(*(self._switch_site(site, self._switch) for site in self._known.values()))
        ready = [site for name, site in self._known.items() if not self._switch or name in self._switched]
        if [id(site) for site in ready] != [id(site) for site in self.sites.all]:
            self.manager.update(ready)

    async def _switch_site(self, site: Site, switch: dict[str, Any]) -> None:
        if site.name in self._switched:
            return
        headers = {"Content-Type": "application/json"}  # the session adds none of its own
        if key := self.service.config.api_key:
            headers["Authorization"] = f"Bearer {key}"
        with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
            async with self.wires.session.put(
                f"{site.url}/policy", json=switch, headers=headers,
                timeout=aiohttp.ClientTimeout(total=SWITCH_SECONDS),
            ) as answer:  # fmt: skip
                await answer.read()
                if answer.status == 200 and switch is self._switch:
                    self._switched.add(site.name)

    async def on_page(self, request: web.Request, body: bytes) -> None:
        """Switch the replicas' loop before the queue's own order; the queue names what is wrong with the request."""
        if (request.method, request.path, request.content_type) != ("PUT", "/policy", "application/json"):
            return
        self._check(request)
        fields = parse(body)
        if "for_s" in fields:  # which is refused
            return
        try:
            name, options = fields["policy"], fields.get("options", {})
            self.menu.check_name(name, own=False)
            self.menu.get_policy(name, self.sites.usual, options, own=False)
            (loop, others), _ = divided(name, options)
        except Exception:  # of a policy's own code, too
            return
        self._switch, self._switched = {"policy": loop, "options": others}, set()
        await self._switch_all()

    def _waiting(self) -> Load:
        waiting = self.manager.queued
        return Load(
            waiting=len(waiting), waiting_tokens=sum(seq.total for seq in waiting),
            prefill_tokens=sum(len(seq.prompt_ids) for seq in waiting),
        )  # fmt: skip
