"""The ingress as the face of several replicas: what is asked of all of them, and of one by its name."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from aiohttp import web
from made_up import ASK, GOOD, STATS, Fixed, Front, behind, breaks, says

from front import wire

MORE = STATS | {"latency-per-token": 0.25, "requests": 6, "total-tokens-handled": 16}


def test_statistics_are_sums_and_those_of_each_replica() -> None:
    async def test(front: Front) -> None:
        stats = json.loads((await front.get("/stats"))[1])
        assert (stats["requests"], stats["throughput"]) == (8, 3.0)
        assert stats["latency-per-token"] == pytest.approx((2 * 0.5 + 6 * 0.25) / 8)
        assert stats["replicas"] == {"a": STATS, "b": MORE}

    behind(test, says(STATS), says(MORE))


def test_health_tells_replicas_apart() -> None:
    async def test(front: Front) -> None:
        status, body = await front.get("/health")
        answer = json.loads(body)
        assert (status, answer["status"]) == (200, "degraded")
        assert answer["replicas"]["b"]["status"] == "stalled"

    behind(test, says({"status": "ok"}), says({"status": "stalled"}, 503))


def test_without_a_healthy_replica_health_is_503() -> None:
    async def test(front: Front) -> None:
        assert (await front.get("/health"))[0] == 503
        assert (await front.get("/health/live"))[0] == 200
        front.ingress.fleet.gone = {"a"}  # type: ignore[attr-defined]
        assert (await front.get("/ready"))[0] == 503

    behind(test, says({"status": "dead"}, 503))


def test_a_refused_key_is_refused_here() -> None:
    async def test(front: Front) -> None:
        for path in ("/stats", "/metrics", "/slots"):
            assert (await front.get(path))[0] == 401

    behind(test, says({"error": {}}, 401), says({"error": {}}, 401))


def test_a_request_is_found_at_the_replica_that_knows_it() -> None:
    async def test(front: Front) -> None:
        for path in ("/requests/r-1", "/requests/r-1/1/blame"):
            assert await front.get(path) == (200, b'{"id": "r-1"}')

    behind(test, says({"error": {}}, 404), says({"id": "r-1"}))


def test_a_replica_that_does_not_know_a_request_hides_no_other_error() -> None:
    async def test(front: Front) -> None:
        assert (await front.get("/requests/r-1/blame"))[0] == 503

    behind(test, says({"error": {}}, 404), says({"error": {}}, 503))


def test_a_switch_of_the_policy_reaches_every_replica() -> None:
    seen: list[Any] = []

    async def test(front: Front) -> None:
        async with front.session.put(front.url + "/policy", json={"policy": "static"}) as answer:
            assert answer.status == 200

    behind(test, says({}, seen=seen), says({}, seen=seen))
    assert seen == [{"policy": "static"}] * 2


def test_a_switch_reaches_a_replica_that_starts_later_before_its_first_request() -> None:
    seen: list[Any] = []

    async def test(front: Front) -> None:
        fleet = front.ingress.fleet
        assert isinstance(fleet, Fixed)
        fleet.gone = {"b"}
        async with front.session.put(
            front.url + "/policy", json={"policy": "static"}, headers={"Authorization": "Bearer k"}
        ) as answer:
            assert answer.status == 200
        fleet.gone = {"a"}
        answers = await asyncio.gather(*(front.post("/inference", ASK) for _ in range(3)))
        assert [status for status, _ in answers] == [200] * 3

    async def late(request: web.Request) -> web.Response:
        seen.append((request.method, request.path, request.headers.get("Authorization"), await request.json()))
        return web.json_response(GOOD)

    behind(test, says({}), late)
    assert seen[0] == ("PUT", "/policy", "Bearer k", {"policy": "static"})
    assert [path for _, path, *_ in seen[1:]] == ["/inference"] * 3


def test_a_switch_that_no_replica_takes_is_not_repeated() -> None:
    seen: list[Any] = []

    async def test(front: Front) -> None:
        async with front.session.put(front.url + "/policy", json={"policy": "none"}) as answer:
            assert answer.status == 400
        await front.post("/inference", ASK)

    behind(test, says({"error": {"type": "invalid_request_error"}}, 400, seen=seen))
    assert len(seen) == 2
    assert seen[1]["prompt"] == "hello"


def test_a_connection_to_a_replica_asks_whether_its_machine_is_there() -> None:
    address = socket.getaddrinfo("127.0.0.1", 1, type=socket.SOCK_STREAM)[0]
    with wire.probing(address) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_KEEPIDLE"):
            assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == wire.IDLE


def test_a_path_names_a_replica() -> None:
    seen: list[Any] = []

    async def test(front: Front) -> None:
        assert (await front.get("/replica/b/events?last=3"))[0] == 200
        assert (await front.get("/replica/c/events"))[0] == 404
        status, body = await front.get("/events")
        assert status == 400
        assert "/replica/NAME/events with one of: a, b" in json.loads(body)["error"]["message"]

    behind(test, says({}), says({}, seen=seen))
    assert seen == ["/events?last=3"]


def test_the_steps_of_a_replica_that_dies_just_end() -> None:
    async def test(front: Front) -> None:
        assert await front.get("/replica/a/events") == (200, b"data: {}\n\n")

    behind(test, breaks(b"data: {}\n\n"))


def test_a_browser_sees_all_replicas_side_by_side() -> None:
    async def test(front: Front) -> None:
        async with front.session.get(front.url, headers={"Accept": "text/html"}, allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (302, "race?run=replica/a&run=replica/b")

    behind(test, says({}), says({}))
