"""What clients may do to the queue of a fleet: bytes that are no request, bodies that it must not read, and long silence."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from aiohttp import web
from made_up import (
    ASK,
    GOOD,
    LIMITS,
    Front,
    behind,
    connected,
    posted,
    read_answer,
    replicated,
    says,
    send,
    streams,
    waits,
)

from integrations.queue.receiving import Limits
from tests.support import SOON

ASKED = json.dumps(ASK).encode()
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(ASKED), ASKED)
QUICK = LIMITS._replace(receive=0.2, send=0.2, idle=0.4, body=0.4)


def error_of(answer: dict[str, Any]) -> str:
    return str(answer["error"]["type"])


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "deflate", "br", "zstd", "x", "identity, gzip", "gzip, gzip"])
@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/policy"])
def test_an_encoded_body_is_refused_by_its_head_alone(coding: str, path: str) -> None:
    seen: list[Any] = []

    async def test(front: Front) -> None:
        data = posted(path, f"Content-Encoding: {coding}", length=1 << 20)
        status, answer = await send(front, data.replace(b"POST /policy", b"PUT /policy"))
        assert status == "HTTP/1.1 415 Unsupported Media Type"
        assert "uncompressed" in (answer["error"] if path == "/generate" else answer["error"]["message"])

    behind(test, says(GOOD, seen=seen))
    assert seen == []


@replicated(says(GOOD))
async def test_two_headers_of_codings_are_one_list(front: Front) -> None:
    codings = ["Content-Encoding: identity", "Content-Encoding: gzip"]
    assert "415" in (await send(front, posted("/inference", *codings, body=b"corrupt")))[0]
    assert "200" in (await send(front, posted("/inference", codings[0], body=ASKED)))[0]


@pytest.mark.parametrize(
    "path",
    ["/health", "/healthz", "/ping", "/ready", "/health/ready", "/health/live", "/", "/stats", "/slots", "/metrics",
     "/v1/models", "/replica/a/stats"],
)  # fmt: skip
@replicated(says(GOOD))
async def test_head_is_answered_as_get_without_a_body(front: Front, path: str) -> None:
    _, body = await front.get(path)
    async with front.session.head(front.url + path) as answer:
        assert (answer.status, await answer.read()) == (200, b"")
    assert body


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GARBAGE\r\n\r\n", 400),
        (b"GET /events HTTP/1.1\r\n\r\n", 400),
        (b"GET /upstream/x/health HTTP/9.9\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nno colon\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (posted("/inference", "Content-Length: 3", body=ASKED), 400),
        (posted("/inference", "Transfer-Encoding: chunked", body=b"zz\r\n"), 400),
        (posted("/inference", "Transfer-Encoding: gzip, chunked", body=CHUNKED), 501),
        (posted("/inference", "Expect: 200-ok", body=ASKED), 417),
        (b"GET /health?%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % (b"x" * 5000), 414),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: %s\r\n\r\n" % (b"x" * 9000), 431),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n%s\r\n" % (b"A: b\r\n" * 200), 431),
    ],
)
def test_a_malformed_request_gets_an_error_in_json(data: bytes, status: int, caplog: pytest.LogCaptureFixture) -> None:
    async def test(front: Front) -> None:
        line, answer = await send(front, data)
        assert line.startswith(f"HTTP/1.1 {status} ")
        assert error_of(answer) == "invalid_request_error"

    behind(test, says(GOOD))
    assert [record for record in caplog.records if record.exc_info] == []


@replicated(says(GOOD))
async def test_a_body_that_is_too_large_is_refused_before_the_client_sends_it(front: Front) -> None:
    async with connected(front) as (reader, writer):
        writer.write(posted("/inference", "Expect: 100-continue", length=100_000_000))
        head, body = await read_answer(reader)
        assert head.startswith("HTTP/1.1 413")
        assert error_of(json.loads(body)) == "invalid_request_error"
    async with connected(front) as (reader, writer):
        writer.write(posted("/inference", "Expect: 100-continue", length=len(ASKED)))
        assert (await read_answer(reader))[0].startswith("HTTP/1.1 100")
        writer.write(ASKED)
        assert (await read_answer(reader))[0].startswith("HTTP/1.1 200")


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [b"GET /health HT"],
        [b"GET /health HTTP/1.1\r\n", *[b"A: b\r\n"] * 9],
        [b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"],
        [b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /"],
    ],
    ids=["silent", "half a head", "a head that trickles", "idle", "half a second head"],
)
@replicated(says(GOOD), limits=QUICK)
async def test_a_connection_without_a_request_is_closed(front: Front, pieces: list[bytes]) -> None:
    async with connected(front) as (reader, writer):
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.04)
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), SOON)


# The limit that must not end the body leaves a busy machine its time.
@pytest.mark.parametrize(
    ("pause", "limits"), [(0.1, LIMITS._replace(body=1.0)), (SOON, LIMITS._replace(receive=1.0))],
    ids=["a byte now and then", "nothing more"],
)  # fmt: skip
def test_a_body_that_trickles_is_refused(pause: float, limits: Limits) -> None:
    async def test(front: Front) -> None:
        async with connected(front) as (reader, writer):
            writer.write(posted("/generate", length=100))
            answer = asyncio.ensure_future(read_answer(reader))
            while not answer.done():
                writer.write(b"x")
                await asyncio.wait([answer], timeout=pause)
            head, body = await answer
            assert head.startswith("HTTP/1.1 408")
            assert json.loads(body)["error_type"] == "timeout"

    behind(test, says(GOOD), limits=limits)


@replicated(says(GOOD))
async def test_a_malformed_chunk_is_refused_at_once(front: Front) -> None:
    async with connected(front) as (reader, writer):
        writer.write(posted("/inference", "Transfer-Encoding: chunked", body=CHUNKED[:9]))
        await asyncio.sleep(0.05)
        writer.write(CHUNKED[9:-5] + b"zz\r\n")
        head, body = await read_answer(reader)
        assert head.startswith("HTTP/1.1 400")
        assert error_of(json.loads(body)) == "invalid_request_error"


@replicated(says(GOOD), limits=LIMITS._replace(connections=2))
async def test_the_longest_idle_connection_makes_room_for_a_new_one(front: Front) -> None:
    async with connected(front) as (idle, _), connected(front) as (used, writer):
        for _ in range(2):
            writer.write(posted("/inference", body=ASKED))
            assert (await read_answer(used))[0].startswith("HTTP/1.1 200")
        assert "200" in (await send(front, posted("/inference", body=ASKED)))[0]
        assert await idle.read() == b""
        writer.write(posted("/inference", body=ASKED))
        assert (await read_answer(used))[0].startswith("HTTP/1.1 200")


def test_a_connection_is_refused_where_all_have_a_request() -> None:
    release = asyncio.Event()

    async def test(front: Front) -> None:
        async with connected(front) as (reader, writer):
            writer.write(posted("/inference", body=ASKED))
            while not front.queue.open:
                await asyncio.sleep(0.01)
            async with connected(front) as (refused, _):
                head, body = await read_answer(refused)
                assert head.startswith("HTTP/1.1 503")
                assert error_of(json.loads(body)) == "unavailable_error"
            release.set()
            assert (await read_answer(reader))[0].startswith("HTTP/1.1 200")

    behind(test, waits(release), limits=LIMITS._replace(connections=1))


def test_a_client_that_reads_nothing_is_disconnected() -> None:
    left = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        try:
            while True:
                await answer.write(b"data: " + b"x" * 65536 + b"\n\n")
        finally:
            left.set()

    async def test(front: Front) -> None:
        async with connected(front) as (_, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(posted("/inference", body=ASKED))
            await asyncio.wait_for(left.wait(), SOON)

    behind(test, endless, limits=LIMITS._replace(send=0.2))


@replicated(streams(b"data: [DONE]\n\n"))
async def test_a_stream_to_a_client_of_http_1_0_ends_with_its_connection(front: Front) -> None:
    async with connected(front) as (reader, writer):
        writer.write(posted("/inference", "Connection: keep-alive", body=ASKED, version="1.0"))
        assert (await asyncio.wait_for(reader.read(), SOON)).endswith(b"data: [DONE]\n\n")


def test_a_client_that_half_closes_its_connection_has_left() -> None:
    came, left = asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.Response:
        came.set()
        try:
            await asyncio.sleep(1000)
        finally:
            left.set()
        return web.json_response(GOOD)

    async def test(front: Front) -> None:
        async with connected(front) as (reader, writer):
            writer.write(posted("/inference", body=ASKED))
            await asyncio.wait_for(came.wait(), SOON)
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), SOON) == b""
            await asyncio.wait_for(left.wait(), SOON)

    behind(test, slow)


def test_without_the_key_no_body_is_read_and_no_replica_is_named() -> None:
    seen: list[Any] = []

    async def test(front: Front) -> None:
        for key in (b"Bearer x", b"Bearer", b"Basic k", b"k", b"Bearer \xff"):
            data = posted("/inference", "Authorization: KEY", length=1000).replace(b"KEY", key)
            assert "401" in (await send(front, data))[0]
        for path in ("/events", "/upstreams", "/stats", "/slots", "/v1/models", "/upstream/x/stats"):
            assert (await front.get(path))[0] == 401
        for right in ({"Authorization": "Bearer k"}, {"X-Api-Key": "k"}):
            assert b"names: a" in (await front.get("/upstream/x/stats", **right))[1]

    behind(test, says(GOOD, seen=seen), words=("--api-key", "k"))
    assert seen == []


def test_headers_of_one_connection_go_no_further() -> None:
    seen: list[Any] = []

    async def note(request: web.Request) -> web.Response:
        seen.extend(name.lower() for name in request.headers)
        return web.json_response(GOOD, headers={"Connection": "X-Hop", "X-Hop": "1", "X-End": "1"})

    async def test(front: Front) -> None:
        async with connected(front) as (reader, writer):
            writer.write(posted("/inference", "Connection: close, X-Own", "X-Own: 1", "X-Far: 1", "TE: x", body=ASKED))
            head = (await read_answer(reader))[0].lower()
            assert "x-end" in head
            assert "x-hop" not in head

    behind(test, note)
    assert "x-far" in seen
    assert {"x-own", "te", "connection"} & set(seen) == set()


@replicated(streams(), says(GOOD))
async def test_a_stream_without_an_event_is_repeated_elsewhere(front: Front) -> None:
    assert (await front.post("/inference", ASK))[0] == 200
