"""The queue of a fleet: what passes, what is repeated elsewhere, and how answers end."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from made_up import ASK, GOOD, Front, behind, breaks, replicated, says, streams, waits

from integrations.queue import sites, upstreams
from routing import bodies
from tests.support import SOON

UNAVAILABLE = {"error": {"message": "draining", "type": "unavailable_error", "param": None, "code": None}}
FULL = {"error": {"message": "full", "type": "overloaded", "param": None, "code": None}}
NO_MEMORY = {"error": {"message": "too large", "type": "out_of_memory", "param": None, "code": "out_of_memory"}}
TOKEN, LAST = b'data: {"text":"a"}\n\n', b"data: [DONE]\n\n"


def anthropics(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": "no", **more}}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstreams, "PATIENCE_SECONDS", 3.0)  # enough for both to answer on a busy machine
    monkeypatch.setattr(sites, "REST_SECONDS", 0.05)


def test_a_request_and_its_answer_pass_unchanged_but_for_host_and_id() -> None:
    seen: list[Any] = []

    async def echo(request: web.Request) -> web.Response:
        seen.append((request.raw_path, request.headers["Host"], request.headers["X-Own"], await request.read()))
        ids = {"X-Request-Id": request.headers["X-Request-Id"], "Set-Cookie": "a=b"}
        return web.json_response({"error": {}}, status=418, headers=ids)

    async def test(front: Front) -> None:
        headers = {"X-Own": "1", "X-Request-Id": "r-1"}
        async with front.session.post(
            front.url + "/v1/completions?x=%20y", data=b'{"seed":1}', headers=headers
        ) as answer:
            assert answer.status == 418
            assert (answer.headers["X-Request-Id"], answer.headers["X-Upstream"]) == ("r-1", "a")
            assert answer.headers["Set-Cookie"] == "a=b"
        assert seen == [("/v1/completions?x=%20y", front.fleet.replicas[0][1][7:], "1", b'{"seed":1}')]

    behind(test, echo)


def test_a_long_answer_passes_in_pieces_and_is_cut_where_its_replica_breaks() -> None:
    read = asyncio.Event()

    async def half(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "2000"})
        await answer.prepare(request)
        await answer.write(b"[" + b"1," * 499 + b"1")
        await read.wait()
        assert request.transport is not None
        request.transport.abort()
        return answer

    async def test(front: Front) -> None:
        async with front.session.post(front.url + "/inference", json=ASK) as answer:
            assert (answer.status, await answer.content.readexactly(1000)) == (200, b"[" + b"1," * 499 + b"1")
            read.set()
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()

    behind(test, half, says(GOOD))


@replicated(says(GOOD), words=("--trusted-hosts", "fleet.example,127.0.0.1"))
async def test_only_trusted_hosts_are_answered(front: Front) -> None:
    assert (await front.post("/inference", ASK, Host="fleet.example"))[0] == 200
    assert (await front.post("/inference", ASK, Host="evil.example"))[0] == 403


@replicated(streams(TOKEN[:5], TOKEN[5:] + TOKEN[:9], TOKEN[9:], LAST))
async def test_a_stream_passes_event_by_event(front: Front) -> None:
    assert await front.post("/inference", ASK | {"stream": True}) == (200, TOKEN + TOKEN + LAST)


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
        assert [site.refusals for site in front.sites] == [1, 0]
        await front.until(lambda: [site.open for site in front.sites] == [0, 0])

    behind(test, first, streams(TOKEN, LAST))


@replicated(breaks(TOKEN + TOKEN[:7]), streams(TOKEN, LAST))
async def test_a_stream_that_has_begun_ends_with_one_error(front: Front) -> None:
    _, body = await front.post("/v1/completions", {"prompt": "hello", "stream": True})
    first, second, end = body.split(b"\n\n")
    assert (first + b"\n\n", end) == (TOKEN, b"")
    assert json.loads(second.removeprefix(b"data: "))["error"]["type"] == "unavailable_error"


@replicated(breaks(b'data:{"token":{}}\n\n'))
async def test_tgis_stream_ends_with_an_error_in_its_dialect(front: Front) -> None:
    _, body = await front.post("/generate_stream", {"inputs": "hello"})
    assert json.loads(body.split(b"\n\n")[1].removeprefix(b"data:"))["error_type"] == "healthcheck"


@replicated(breaks(b'event: message_start\ndata: {"type":"message_start"}\n\n'))
async def test_anthropics_stream_ends_with_an_error_in_its_dialect(front: Front) -> None:
    _, body = await front.post("/v1/messages", {"messages": []})
    name, content = body.split(b"\n\n")[1].split(b"\n")
    assert (name, json.loads(content.removeprefix(b"data: "))["error"]["type"]) == (b"event: error", "overloaded_error")


@pytest.mark.parametrize(
    "first", [says(FULL, 429), says(anthropics("rate_limit_error"), 429), says(anthropics("overloaded_error"), 529),
              streams(b": ping\n\n", b"event: error\ndata: %s\n\n" % json.dumps(anthropics("overloaded_error")).encode())],
)  # fmt: skip
def test_a_full_replica_gives_way_to_the_next(first: Any) -> None:
    async def test(front: Front) -> None:
        status, body = await front.post("/inference", ASK)
        assert (status, b"good" in body) == (200, True)

    behind(test, first, says(GOOD))


@pytest.mark.usefixtures("impatient")
@replicated(says(FULL, 429), says(FULL, 429))
async def test_when_all_are_full_the_answer_is_theirs(front: Front) -> None:
    status, body = await front.post("/inference", ASK)
    assert (status, json.loads(body)) == (429, FULL)


@pytest.mark.parametrize(
    ("status", "content"),
    [(503, NO_MEMORY), (529, anthropics("overloaded_error", details={})), (400, {"error": {}}), (500, {}), (504, {})],
)
def test_an_error_of_the_request_itself_is_not_repeated(status: int, content: Any) -> None:
    async def test(front: Front) -> None:
        answer = await front.post("/inference", ASK)
        assert (answer[0], json.loads(answer[1])) == (status, content)

    behind(test, says(content, status), says(GOOD))


@replicated(says(GOOD))
async def test_a_request_waits_for_a_replica(front: Front) -> None:
    await front.only()
    request = asyncio.create_task(front.post("/inference", ASK))
    await front.until(lambda: front.queue.manager.waiting)
    await front.queue.refresh()
    assert front.fleet.waiting.waiting == 1  # as the autoscaler learns
    assert front.fleet.waiting.waiting_tokens >= 4
    await front.only("a")
    assert (await request)[0] == 200


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("pieces", [[], [b": ping\n\n"]])
def test_a_request_that_breaks_every_replica_gets_503(pieces: list[bytes]) -> None:
    async def test(front: Front) -> None:
        status, body = await front.post("/inference", ASK)
        assert (status, json.loads(body)["error"]["type"]) == (503, "unavailable_error")

    behind(test, breaks(*pieces))


@pytest.mark.parametrize("begins", [True, False])
def test_a_client_that_leaves_is_gone_at_the_replica_too(begins: bool) -> None:
    came, left = asyncio.Event(), asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        await request.read()
        try:
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            if begins:
                await answer.prepare(request)
                await answer.write(TOKEN)
            else:
                came.set()
            await asyncio.sleep(1000)
        finally:
            left.set()
        return answer

    async def test(front: Front) -> None:
        async def ask() -> None:
            async with front.session.post(front.url + "/inference", json=ASK | {"stream": True}) as answer:
                await answer.content.readexactly(len(TOKEN))
                came.set()
                await answer.read()

        request = asyncio.create_task(ask())
        await came.wait()
        request.cancel()
        await asyncio.wait_for(left.wait(), SOON)
        await front.until(lambda: not front.sites[0].open)

    behind(test, endless)


def test_a_draining_queue_refuses_requests_and_finishes_open_ones() -> None:
    release = asyncio.Event()

    async def test(front: Front) -> None:
        request = asyncio.create_task(front.post("/inference", ASK))
        await front.until(lambda: front.queue.open)
        front.queue.draining = True
        assert (await front.post("/generate", {"inputs": "a"}))[0] == 503
        release.set()
        assert (await request)[0] == 200
        assert json.loads((await front.get("/ready"))[1])["status"] == "draining"

    behind(test, waits(release))


@replicated(says(GOOD))
async def test_a_body_beyond_the_limit_is_refused(front: Front) -> None:
    async with front.session.post(front.url + "/inference", data=io.BytesIO(b"x" * (bodies.LARGEST + 1))) as answer:
        status, body = answer.status, await answer.read()
    assert (status, json.loads(body)["error"]["type"]) == (413, "invalid_request_error")
