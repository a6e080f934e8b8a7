"""The ingress: what passes, what is repeated elsewhere, how answers end, and what is asked of all replicas."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from front import Fixed, Front, behind, breaks, listening, says, streams
from support import free_port, run_async

from fleet import bodies, connections, ingress
from fleet.bodies import PROMPTS

GOOD = {"completion": "good"}
UNAVAILABLE = {"error": {"message": "draining", "type": "unavailable_error", "param": None, "code": None}}
FULL = {"error": {"message": "full", "type": "overloaded", "param": None, "code": None}}
NO_MEMORY = {"error": {"message": "too large", "type": "out_of_memory", "param": None, "code": "out_of_memory"}}
TOKEN, LAST = b'data: {"text":"a"}\n\n', b"data: [DONE]\n\n"
ASK = {"prompt": "hello", "num_tokens": 4}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(ingress, "PAUSE_SECONDS", 0.01)


def test_a_request_and_its_answer_pass_unchanged() -> None:
    async def echo(request: web.Request) -> web.Response:
        seen = {"method": request.method, "path": request.raw_path, "host": request.headers["Host"],
                "own": request.headers["X-Own"], "body": (await request.read()).decode()}  # fmt: skip
        return web.json_response(seen, status=418, headers={"X-Request-Id": "r-1", "Set-Cookie": "a=b"})

    async def test(front: Front) -> None:
        url = front.url + "/v1/some%2Fpath?x=%20y"
        async with front.session.put(url, data=b"{bad", headers={"X-Own": "1"}) as answer:
            seen = await answer.json()
            assert answer.status == 418
            assert (answer.headers["X-Request-Id"], answer.headers["X-Replica"]) == ("r-1", "a")
        assert seen == {
            "method": "PUT", "path": "/v1/some%2Fpath?x=%20y", "host": front.url[7:], "own": "1", "body": "{bad",
        }  # fmt: skip

    behind(test, echo)


def test_a_stream_passes_event_by_event() -> None:
    async def test(front: Front) -> None:
        assert await front.post("/inference", ASK | {"stream": True}) == (200, TOKEN + TOKEN + LAST)

    behind(test, streams(TOKEN[:5], TOKEN[5:] + TOKEN[:9], TOKEN[9:], LAST))


@pytest.mark.parametrize(
    "first",
    [
        breaks(),
        breaks(b": ping\n\n"),
        says(UNAVAILABLE, 503),
        streams(b"data: %s\n\n" % json.dumps(UNAVAILABLE).encode()),
    ],
    ids=["broken", "broken after a ping", "draining", "draining in a stream"],
)
def test_a_request_without_a_token_is_repeated_elsewhere(first: Any) -> None:
    async def test(front: Front) -> None:
        status, body = await front.post("/inference", ASK | {"stream": True})
        assert (status, body.replace(b": ping\n\n", b"")) == (200, TOKEN + LAST)
        assert front.ingress.pool.retries == 1
        assert [known.open for known in front.ingress.pool.known.values()] == [0, 0]

    behind(test, first, streams(TOKEN, LAST))


@pytest.mark.parametrize("path", PROMPTS)
def test_both_attempts_have_the_same_seed(path: str) -> None:
    seen: list[dict[str, Any]] = []

    async def test(front: Front) -> None:
        assert (await front.post(path, {PROMPTS[path]: "hello"}))[0] == 200

    behind(test, breaks(seen=seen), says(GOOD, seen=seen))
    seeds = [body.get("parameters", body)["seed"] for body in seen]
    assert len(seeds) == 2
    assert seeds[0] == seeds[1]


def test_a_stream_that_has_begun_ends_with_one_error() -> None:
    async def test(front: Front) -> None:
        _, body = await front.post("/v1/completions", {"prompt": "hello", "stream": True})
        first, second, end = body.split(b"\n\n")
        assert (first + b"\n\n", end) == (TOKEN, b"")
        assert json.loads(second.removeprefix(b"data: "))["error"]["type"] == "unavailable_error"

    behind(test, breaks(TOKEN + TOKEN[:7]), streams(TOKEN, LAST))


def test_tgis_stream_ends_with_an_error_in_its_dialect() -> None:
    async def test(front: Front) -> None:
        _, body = await front.post("/generate_stream", {"inputs": "hello"})
        assert json.loads(body.split(b"\n\n")[1].removeprefix(b"data:"))["error_type"] == "healthcheck"

    behind(test, breaks(b'data:{"token":{}}\n\n'))


def test_a_full_replica_gives_way_to_the_next() -> None:
    async def test(front: Front) -> None:
        assert (await front.post("/inference", ASK))[0] == 200

    behind(test, says(FULL, 429), says(GOOD))


def test_when_all_are_full_the_answer_is_theirs() -> None:
    async def test(front: Front) -> None:
        status, body = await front.post("/inference", ASK)
        assert (status, json.loads(body)) == (429, FULL)

    behind(test, says(FULL, 429), says(FULL, 429))


@pytest.mark.parametrize(("status", "content"), [(503, NO_MEMORY), (400, {"error": {}}), (500, {}), (504, {})])
def test_an_error_of_the_request_itself_is_not_repeated(status: int, content: Any) -> None:
    async def test(front: Front) -> None:
        answer = await front.post("/inference", ASK)
        assert (answer[0], json.loads(answer[1])) == (status, content)

    behind(test, says(content, status), says(GOOD))


def test_a_request_waits_for_a_replica_and_then_gets_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress, "PATIENCE_SECONDS", 5.0)

    async def test(front: Front) -> None:
        front.ingress.fleet.gone = {"a"}  # type: ignore[attr-defined]
        asked = asyncio.create_task(front.post("/inference", ASK))
        await asyncio.sleep(0.1)
        assert not asked.done()
        front.ingress.fleet.gone = set()  # type: ignore[attr-defined]
        assert (await asked)[0] == 200
        monkeypatch.setattr(ingress, "PATIENCE_SECONDS", 0.05)
        front.ingress.fleet.gone = {"a"}  # type: ignore[attr-defined]
        status, body = await front.post("/inference", ASK)
        assert (status, json.loads(body)["error"]["type"]) == (503, "unavailable_error")

    behind(test, says(GOOD))


@pytest.mark.parametrize("begins", [True, False])
def test_a_client_that_leaves_is_gone_at_the_replica_too(begins: bool) -> None:
    left = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        await request.read()
        try:
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            if begins:
                await answer.prepare(request)
                await answer.write(TOKEN)
            await asyncio.sleep(30)
        finally:
            left.set()
        return answer

    async def test(front: Front) -> None:
        asked = asyncio.create_task(front.post("/inference", ASK | {"stream": True}))
        while not front.ingress.pool.known or not front.ingress.pool.known["a"].open:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        asked.cancel()
        await asyncio.wait_for(left.wait(), 5)
        while front.ingress.pool.known["a"].open:
            await asyncio.sleep(0.01)

    behind(test, endless)


def test_a_draining_ingress_refuses_requests_and_finishes_open_ones() -> None:
    release = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.json_response(GOOD)

    async def test(front: Front) -> None:
        asked = asyncio.create_task(front.post("/inference", ASK))
        while not front.ingress.open:
            await asyncio.sleep(0.01)
        front.ingress.draining = True
        assert (await front.post("/generate", {"inputs": "a"}))[0] == 503
        release.set()
        assert (await asked)[0] == 200
        assert json.loads((await front.get("/ready"))[1])["status"] == "draining"

    behind(test, slow)


def test_a_stopped_ingress_ends_when_its_open_requests_are_answered() -> None:
    release = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.json_response(GOOD)

    async def run() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", slow)
        stop, port = asyncio.Event(), free_port()
        async with listening(app) as url, aiohttp.ClientSession() as session:
            front = ingress.Ingress(Fixed(url))
            serving = asyncio.create_task(ingress.serve(front, "127.0.0.1", port, stop, 20.0))
            await asyncio.sleep(0.05)
            asked = asyncio.create_task(session.post(f"http://127.0.0.1:{port}/inference", json=ASK))
            while not front.open:
                await asyncio.sleep(0.01)
            stop.set()
            await asyncio.sleep(0.05)
            assert not serving.done()
            release.set()
            async with await asked as answer:
                assert await answer.json() == GOOD
            await asyncio.wait_for(serving, 10)

    run_async(run())


def test_a_body_beyond_the_limit_is_refused() -> None:
    async def test(front: Front) -> None:
        async with front.session.post(front.url + "/inference", data=io.BytesIO(b"x" * (bodies.LARGEST + 1))) as answer:
            status, body = answer.status, await answer.read()
        assert (status, json.loads(body)["error"]["type"]) == (413, "invalid_request_error")

    behind(test, says(GOOD))


STATS = {"latency-per-token": 0.5, "requests": 2, "total-tokens-handled": 8, "total-elapsed-time": 4.0, "policy": "x"}
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
        assert await front.get("/requests/r-1") == (200, b'{"id": "r-1"}')

    behind(test, says({"error": {}}, 404), says({"id": "r-1"}))


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
    with connections.probing(address) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_KEEPIDLE"):
            assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == connections.IDLE


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
