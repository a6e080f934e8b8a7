"""One of two upstreams is broken: the other answers, and the broken one rests, is tried by one request, and comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from scripted import Answer, Front, before, queued

from integrations.queue import sites
from integrations.queue.server import Settings

Broken = Callable[[asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: 100\r\n\r\n"
EVENT = b'data: {"choices":[{"delta":{"content":"t"}}]}\n\n'


def says(data: bytes) -> Broken:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    return answer


async def resets(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def is_silent(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(1000)


WAYS = {
    "resets": resets, "502": says(HEAD % (b"502 Bad", b"text/html") + b"x" * 100), "silent": is_silent,
    "500": says(HEAD % (b"500 No", b"text/html") + b"x" * 100), "503": says(HEAD % (b"503 No", b"text/html") + b"x" * 100),
    "empty": says(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), "head": says(HEAD % (b"200 OK", b"application/json")), "half": says(HEAD % (b"200 OK", b"text/event-stream") + EVENT),
}  # fmt: skip


@asynccontextmanager
async def broken(answer: Broken) -> AsyncIterator[tuple[str, list[int]]]:
    """Serve on a free port what is broken; yield its URL, and a list of the connections that brought a request."""
    seen: list[int] = []
    tasks: list[asyncio.Task[Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(cast(asyncio.Task[Any], asyncio.current_task()))
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            if await reader.read(65536):
                seen.append(1)
                await answer(writer)
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)


async def named(front: Front, path: str) -> Any:
    return (await front.send("GET", path)).json


@pytest.mark.parametrize("way", ["refuses", *WAYS])
def test_the_other_upstream_answers_at_least_198_of_200_requests(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "FIRST_REST", 60.0)  # each probe of one that cuts streams costs an answer

    async def test(front: Front) -> None:
        async with broken(WAYS.get(way, resets)) as (url, seen):
            front.queue.sites.all[0].url = "http://127.0.0.1:9" if way == "refuses" else url
            answers = await front.all(*({"tag": i, "max_tokens": 1} for i in range(200)))
            whole = [one for one in answers if one.status == 200 and "[DONE]" in one.text]
            assert len(whole) >= 198
            assert {one.headers["X-Upstream"] for one in whole} == {"u1"}
            if way != "503":  # that is a refusal, and asks for a second
                assert len(seen) <= 6
                assert (await named(front, "/upstreams"))[0]["failing"]
                assert "u0" in (await named(front, "/health"))["reason"]
        await front.until(lambda: front.idle)

    before(test, count=2, slots=2, step=0.001, settings=Settings(idle=3.0 if way == "silent" else 20.0))


@queued(count=2, slots=4)
async def test_one_request_at_a_time_tries_a_silent_upstream_until_it_takes_one(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sites, "FIRST_REST", 0.02)
    async with broken(is_silent) as (url, seen):
        site, well = front.queue.sites.all[0], front.upstream.url
        site.url = "http://127.0.0.1:9"
        await front.all(*({"max_tokens": 1} for _ in range(6)))
        site.url = url
        requests = asyncio.create_task(front.all(*({"tag": i, "max_tokens": 9} for i in range(40))))
        await front.until(lambda: len(front.upstreams[1].ended) >= 36)
        assert len(seen) == 1
        site.url = well
    assert {answer.status for answer in await requests} == {200}  # the one that tried was cut, and sent to the other
    while site.failing:
        await front.ask(max_tokens=1)
    assert {(await front.ask(max_tokens=1)).status} == {200}
    await front.until(lambda: front.idle and front.queue.manager.slot_cap == 8)


@queued(count=2)
async def test_an_error_that_every_upstream_answers_is_the_requests_own_and_rests_none(front: Front) -> None:
    answers = await front.all(*({"tag": i, "fault": "500"} for i in range(8)))
    assert {(answer.status, answer.text) for answer in answers} == {(500, '{"error": "boom"}')}
    assert [len(set(one.tags)) for one in front.upstreams] == [8, 8]
    assert [one["failing"] for one in await named(front, "/upstreams")] == [None, None]


@pytest.mark.parametrize(
    ("others", "statuses"), [(["bob"], {"bob": 200}), (["bob", "carol"], {"bob": 429, "carol": 503})]
)
@queued()
async def test_a_refusal_rests_one_key_until_another_is_refused_and_nobody_waits_for_long(
    front: Front, others: list[str], statuses: dict[str, int]
) -> None:
    async def ask(key: str, **body: Any) -> Answer:
        return await front.ask({"Authorization": f"Bearer {key}"}, max_tokens=3, **body)

    front.hold()
    first = asyncio.create_task(ask("alice"))
    await front.until(lambda: front.upstream.running)
    waiting = [asyncio.create_task(ask("alice", fault="429", after=3600, times=10)) for _ in range(5)]
    await front.until(lambda: front.queue.manager.waiting == 5)
    front.go()
    assert (await first).status == 200
    assert {answer.status for answer in await asyncio.gather(*waiting)} == {429}
    assert len(front.upstream.seen) == 2  # the others of this key were not sent
    fault = {"fault": "429", "after": 3600, "times": 10} if "carol" in others else {}
    assert {key: (await ask(key, **fault)).status for key in others} == statuses
    await front.until(lambda: front.idle)


@pytest.mark.parametrize("most", [1000, 1])
@pytest.mark.parametrize("header", ["Authorization", "X-Queue-Client"])
@queued()
async def test_refusals_of_several_models_of_one_key_rest_no_other_request(
    front: Front, header: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sites, "MOST_RESTS", most)
    refused = [
        await front.ask({header: "alice"}, model=model, fault="429", after=60, times=9, max_tokens=3)
        for model in ("a", "b", "c")
    ]
    assert [answer.status for answer in refused] == [429] * 3
    assert (await front.ask({header: "bob"}, model="d", max_tokens=3)).status == 200


@pytest.mark.parametrize(("key", "fault"), [("", None), ("sk-expired", "u0 answers 401")])
def test_a_key_that_one_upstream_rejects_is_answered_by_the_other_and_rests_for_all_only_if_it_is_the_queues(
    key: str, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sites, "REST_SECONDS", 60.0)
    monkeypatch.setattr(sites, "FIRST_REST", 60.0)

    async def test(front: Front) -> None:
        async with broken(says(HEAD % (b"401 No", b"text/html") + b"x" * 100)) as (url, seen):
            front.queue.sites.all[0].url = url
            answers = await front.all(*({"tag": i, "max_tokens": 1} for i in range(40)))
            assert {answer.status for answer in answers} == {200}
            assert len(seen) < 20
            assert (await named(front, "/upstreams"))[0]["failing"] == fault

    before(test, count=2, settings=Settings(key=key))
