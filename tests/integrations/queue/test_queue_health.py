"""The health of a queue is that of its upstreams: which cannot be reached, and since when."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from scripted import Front, before

NOWHERE = "http://127.0.0.1:9"


def with_down(count: int, test: Callable[[Front, Any], Awaitable[None]]) -> None:
    """Run a test with two upstreams, of which so many cannot be reached, and what /health says."""

    async def run(front: Front) -> None:
        for site in front.queue.sites.all[:count]:
            site.url = NOWHERE
        await test(front, await front.send("GET", "/health"))

    before(run, count=2)


def test_a_queue_without_any_upstream_is_down_and_says_which_since_when() -> None:
    async def test(front: Front, health: Any) -> None:
        assert (health.status, health.json["status"]) == (503, "down")
        assert "u0 cannot be reached since " in health.json["reason"]
        assert "u1 cannot be reached since " in health.json["reason"]
        assert (await front.send("GET", "/ready")).status == 503

    with_down(2, test)


def test_a_queue_with_one_upstream_is_well_and_names_the_other() -> None:
    async def test(front: Front, health: Any) -> None:
        assert (health.status, health.json["status"]) == (200, "ok")
        assert health.json["reason"].startswith("u0 cannot be reached since ")
        assert front.upstreams[1].seen == []  # nothing was asked of it

    with_down(1, test)


def test_an_upstream_that_comes_back_is_well_again_and_keeps_its_first_time_until_then() -> None:
    async def test(front: Front, health: Any) -> None:
        site, since = front.queue.sites.all[0], front.queue.sites.all[0].down_since
        await front.send("GET", "/health")
        assert site.down_since == since
        site.url = front.upstreams[0].url
        assert (await front.send("GET", "/health")).json.get("reason") is None

    with_down(1, test)


@pytest.mark.parametrize("path", ["/policy", "/stats", "/metrics", "/slots", "/health/live"])
def test_the_routes_of_the_queue_itself_work_without_upstreams(path: str) -> None:
    async def test(front: Front, health: Any) -> None:
        assert (await front.send("GET", path)).status == 200

    with_down(2, test)
