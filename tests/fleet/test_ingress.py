"""The ingress: what passes, what is repeated elsewhere, and how answers end."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from made_up import ASK, GOOD, LIMITS, Fixed, Front, behind, breaks, listening, says, streams, waits

from fleet import bodies, ingress, options
from fleet.bodies import PROMPTS
from front import door
from tests.support import run_async

UNAVAILABLE = {"error": {"message": "draining", "type": "unavailable_error", "param": None, "code": None}}
FULL = {"error": {"message": "full", "type": "overloaded", "param": None, "code": None}}
NO_MEMORY = {"error": {"message": "too large", "type": "out_of_memory", "param": None, "code": "out_of_memory"}}
TOKEN, LAST = b'data: {"text":"a"}\n\n', b"data: [DONE]\n\n"


def anthropics(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": "no", **more}}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(ingress, "PAUSE_SECONDS", 0.01)


def test_a_request_and_its_answer_pass_unchanged_but_for_the_host() -> None:
    own: list[str] = []

    async def echo(request: web.Request) -> web.Response:
        seen = {"method": request.method, "path": request.raw_path, "own_host": request.headers["Host"] == own[0],
                "own": request.headers["X-Own"], "body": (await request.read()).decode()}  # fmt: skip
        return web.json_response(seen, status=418, headers={"X-Request-Id": "r-1", "Set-Cookie": "a=b"})

    async def test(front: Front) -> None:
        own.append(front.ingress.fleet.replicas[0].url[7:])  # type: ignore[attr-defined]
        url = front.url + "/v1/some%2Fpath?x=%20y"
        async with front.session.put(url, data=b"{bad", headers={"X-Own": "1"}) as answer:
            seen = await answer.json()
            assert answer.status == 418
            assert (answer.headers["X-Request-Id"], answer.headers["X-Replica"]) == ("r-1", "a")
        assert seen == {
            "method": "PUT", "path": "/v1/some%2Fpath?x=%20y", "own_host": True, "own": "1", "body": "{bad",
        }  # fmt: skip

    behind(test, echo)


def test_a_long_answer_passes_in_pieces_and_is_cut_where_its_replica_breaks() -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "2000"})
        await answer.prepare(request)
        await answer.write(b"[" + b"1," * 499 + b"1")
        await asyncio.sleep(0.2)
        assert request.transport is not None
        request.transport.abort()
        return answer

    async def test(front: Front) -> None:
        async with front.session.post(front.url + "/inference", json=ASK) as answer:
            assert (answer.status, await answer.content.readexactly(1000)) == (200, b"[" + b"1," * 499 + b"1")
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()

    behind(test, half, says(GOOD))


def test_only_trusted_hosts_are_answered() -> None:
    async def test(front: Front) -> None:
        front.ingress.hosts = ["fleet.example", "127.0.0.1"]
        assert (await front.post("/inference", ASK, Host="fleet.example"))[0] == 200
        status, body = await front.post("/inference", ASK, Host="evil.example")
        assert (status, "--trusted-hosts" in json.loads(body)["error"]["message"]) == (400, True)

    behind(test, says(GOOD))


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


@pytest.mark.parametrize("path", [path for path in PROMPTS if path != "/v1/embeddings"])
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


def test_anthropics_stream_ends_with_an_error_in_its_dialect() -> None:
    async def test(front: Front) -> None:
        _, body = await front.post("/v1/messages", {"messages": []})
        name, content = body.split(b"\n\n")[1].split(b"\n")
        assert (name, json.loads(content.removeprefix(b"data: "))["error"]["type"]) == (
            b"event: error",
            "overloaded_error",
        )

    behind(test, breaks(b'event: message_start\ndata: {"type":"message_start"}\n\n'))


@pytest.mark.parametrize(
    "first", [says(FULL, 429), says(anthropics("rate_limit_error"), 429), says(anthropics("overloaded_error"), 529),
              streams(b"event: error\ndata: %s\n\n" % json.dumps(anthropics("overloaded_error")).encode())],
)  # fmt: skip
def test_a_full_replica_gives_way_to_the_next(first: Any) -> None:
    async def test(front: Front) -> None:
        assert (await front.post("/inference", ASK))[0] == 200

    behind(test, first, says(GOOD))


def test_when_all_are_full_the_answer_is_theirs() -> None:
    async def test(front: Front) -> None:
        status, body = await front.post("/inference", ASK)
        assert (status, json.loads(body)) == (429, FULL)

    behind(test, says(FULL, 429), says(FULL, 429))


@pytest.mark.parametrize(
    ("status", "content"),
    [(503, NO_MEMORY), (529, anthropics("overloaded_error", details={})), (400, {"error": {}}), (500, {}), (504, {})],
)
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

    async def test(front: Front) -> None:
        asked = asyncio.create_task(front.post("/inference", ASK))
        while not front.ingress.open:
            await asyncio.sleep(0.01)
        front.ingress.draining = True
        assert (await front.post("/generate", {"inputs": "a"}))[0] == 503
        release.set()
        assert (await asked)[0] == 200
        assert json.loads((await front.get("/ready"))[1])["status"] == "draining"

    behind(test, waits(release))


def test_a_stopped_ingress_ends_when_its_open_requests_are_answered() -> None:
    release = asyncio.Event()

    async def run() -> None:
        stop, sock = asyncio.Event(), options.bind("127.0.0.1", 0)
        async with listening(waits(release)) as url, aiohttp.ClientSession() as session:
            front = ingress.Ingress(Fixed(url), LIMITS)
            serving = asyncio.create_task(door.serve(front, sock, stop, 20.0))
            await asyncio.sleep(0.05)
            asked = asyncio.create_task(session.post(f"http://127.0.0.1:{sock.getsockname()[1]}/inference", json=ASK))
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
