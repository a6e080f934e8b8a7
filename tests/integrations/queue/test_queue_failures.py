"""What the client gets, and what becomes of request and slot, when an upstream, a client or a policy fails."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import tracemalloc

import aiohttp
import pytest
from scripted import CHAT, Answer, Front, before, connected, queued, queueing, scripted

from integrations.queue import relay, sites, upstreams
from integrations.queue.server import Settings
from integrations.queue.sites import EVERYONE
from tests.support import run_async
from tests.support.servers import free_port

ONE = {"max_tokens": 5}


@queued()
async def test_an_upstream_that_is_down_is_waited_for_and_then_503(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstreams, "PATIENCE_SECONDS", 0.5)
    front.queue.sites.all[0].url = "http://127.0.0.1:9"
    answer = await front.ask(**ONE)
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    assert "refuses connections" in answer.json["error"]["message"]
    await front.until(lambda: front.idle)


def test_requests_wait_for_an_upstream_that_comes_back() -> None:
    async def run() -> None:
        port = free_port()
        async with scripted(1, 0.002, port) as gone:
            assert not gone.seen
        async with queueing([gone], "dynamic", 1, Settings(), {}) as front:
            requests = asyncio.create_task(front.all(*({"tag": i, **ONE} for i in range(3)), in_order=True))
            await front.until(lambda: front.queue.sites.all[0].failures)
            async with scripted(1, 0.002, port) as back:
                assert {answer.status for answer in await requests} == {200}
                assert back.tags == ["0", "1", "2"]

    run_async(asyncio.wait_for(run(), 180))


@pytest.mark.parametrize("status", ["429", "503"])
@queued()
async def test_a_refusal_before_the_first_byte_goes_back_to_the_head_of_the_queue(front: Front, status: str) -> None:
    asks = [{"tag": "refused", "fault": status, "times": 2, **ONE}, *({"tag": i, **ONE} for i in range(2))]
    answers = await front.all(*asks, in_order=True)
    assert [answer.status for answer in answers] == [200] * 3
    assert front.upstream.tags == ["refused"] * 3 + ["0", "1"]
    assert float(answers[0].headers["X-Queue-Wait"]) > 0.15  # until the upstream took it
    assert front.queue.manager.slot_cap == 1


@queued(slots=4)
async def test_one_request_finds_out_whether_an_upstream_takes_requests_again_and_then_the_others_follow(
    front: Front,
) -> None:
    front.queue.sites.refuse(front.queue.sites.all[0], EVERYONE, None, {"Retry-After": "0.1"})
    asks = ({"tag": i, "fault": "429", "times": 1, "after": 1, **ONE} for i in range(4))
    requests = asyncio.create_task(front.all(*asks, in_order=True))
    await front.until(lambda: front.upstream.refusals)
    assert front.upstream.tags == ["0"]
    assert {answer.status for answer in await requests} == {200}
    assert not front.queue.sites.all[0].rests


@queued(slots=3)
async def test_a_request_that_alone_is_refused_does_not_keep_the_others_from_the_upstream(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstreams, "PATIENCE_SECONDS", 60.0)
    refused = asyncio.create_task(front.ask(fault="429", after=0.05, times=10_000, **ONE))
    await front.until(lambda: front.upstream.refusals)
    answers = await front.all(*({"tag": i, **ONE} for i in range(6)))
    assert {answer.status for answer in answers} == {200}
    monkeypatch.setattr(upstreams, "PATIENCE_SECONDS", 0.0)
    assert (await refused).status == 429


@queued(slots=2)
async def test_an_answer_in_one_piece_that_is_not_refused_at_once_counts_as_taken(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sites, "REST_SECONDS", 0.02)
    front.hold()
    ask = {"fault": "429", "times": 2, "max_tokens": 5, "stream": False}
    requests = asyncio.create_task(front.all(*({"tag": i, **ask} for i in range(2))))
    await front.until(lambda: len(front.upstream.running) == 2)
    front.go()
    await requests


@queued(count=2)
async def test_requests_wait_for_a_busy_upstream_however_long_another_is_down(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstreams, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(sites, "REST_SECONDS", 0.02)
    front.queue.sites.all[1].url = "http://127.0.0.1:9"
    answers = await front.all(*({"tag": i, "max_tokens": 60} for i in range(3)))
    assert {answer.status for answer in answers} == {200}
    await front.until(lambda: front.idle)


@queued(slots=2)
async def test_requests_that_waited_long_enough_for_an_upstream_end_together(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstreams, "PATIENCE_SECONDS", 1.0)
    front.queue.sites.all[0].url = "http://127.0.0.1:9"
    answers = await front.all(*({"tag": i, **ONE} for i in range(40)))
    assert {answer.status for answer in answers} == {503}
    assert max(answer.seconds for answer in answers) < 15  # 20 if they waited in pairs
    await front.until(lambda: front.idle)


@queued()
async def test_a_refusal_for_long_is_passed_on(front: Front) -> None:
    answer = await front.ask(fault="429", after=30, **ONE)
    assert (answer.status, answer.headers["Retry-After"]) == (429, "30")
    assert answer.json == {"error": {"message": "slow down"}}


@pytest.mark.parametrize(
    ("fault", "status", "text"),
    [("500", 500, '{"error": "boom"}'), ("html", 502, "<html>bad gateway</html>"), ("redirect", 307, "")],
)
@queued()
async def test_any_other_answer_is_passed_on_unchanged(front: Front, fault: str, status: int, text: str) -> None:
    answer = await front.ask(fault=fault, **ONE)
    assert (answer.status, answer.text) == (status, text)
    assert (await front.ask(**ONE)).status == 200
    await front.until(lambda: front.idle)


@pytest.mark.parametrize(("fault", "status"), [("close", 502), ("hang", 504)])
def test_an_upstream_that_breaks_or_is_silent_before_the_first_byte_is_not_asked_twice(fault: str, status: int) -> None:
    async def test(front: Front) -> None:
        answer = await front.ask(fault=fault, tag="broken", **ONE)
        assert answer.status == status
        assert front.upstream.tags == ["broken"]
        await front.until(lambda: front.idle)

    before(test, settings=Settings(idle=3.0 if fault == "hang" else 20.0))


@pytest.mark.parametrize("fault", ["midclose", "midhang"])
def test_a_stream_whose_upstream_fails_ends_with_one_error_event(fault: str) -> None:
    async def test(front: Front) -> None:
        answer = await front.ask(fault=fault, max_tokens=9)
        events = [line for line in answer.text.splitlines() if line.startswith("data:")]
        assert (answer.status, len(events)) == (200, 4)
        assert set(json.loads(events[-1][5:])) == {"error"}
        assert (await front.ask(**ONE)).status == 200
        await front.until(lambda: front.idle)

    before(test, settings=Settings(idle=3.0 if fault == "midhang" else 20.0))


@queued()
async def test_an_answer_in_ollamas_dialect_is_counted_and_its_errors_are_lines_of_it(front: Front) -> None:
    whole = await front.ask(path="/api/chat", max_tokens=6)
    broken = await front.ask(path="/api/chat", max_tokens=9, fault="midclose")
    front.queue.draining = True
    refused = await front.ask(path="/api/chat", max_tokens=2)
    assert [json.loads(line)["done"] for line in whole.text.splitlines()] == [False] * 6 + [True]
    assert isinstance(json.loads(broken.text.splitlines()[-1])["error"], str)
    assert isinstance(refused.json["error"], str)
    await front.until(lambda: front.idle)
    assert (await front.send("GET", "/stats")).json["total-tokens-handled"] in (6, 9)


@pytest.mark.parametrize("fault", ["cut", "cuthang"])
def test_a_body_with_a_length_that_breaks_or_stops_is_taken_for_whole_by_nobody(fault: str) -> None:
    async def test(front: Front) -> None:
        answer = await front.ask(fault=fault, stream=False, **ONE)
        assert answer.error
        assert (await front.ask(**ONE)).status == 200
        await front.until(lambda: front.idle)

    before(test, settings=Settings(idle=3.0 if fault == "cuthang" else 20.0))


@pytest.mark.parametrize(("at", "cancelled"), [(0, 1), (3, 0)])
@queued()
async def test_an_error_event_of_the_upstream_is_passed_on(front: Front, at: int, cancelled: int) -> None:
    answer = await front.ask(fault="miderror", at=at, max_tokens=9)
    assert answer.text.endswith('data: {"error":{"message":"oom"}}\n\n')
    await front.until(lambda: front.idle)
    stats = (await front.send("GET", "/stats")).json
    assert stats["requests"] == 1 - cancelled


@queued()
async def test_a_client_that_leaves_while_it_waits_never_reaches_the_upstream(front: Front) -> None:
    (first,) = await front.occupied(1)
    waits = asyncio.create_task(front.ask(tag="leaver", **ONE))
    await front.until(lambda: front.queue.manager.waiting)
    waits.cancel()
    await front.until(lambda: not front.queue.manager.waiting)
    front.go()
    await first
    await front.until(lambda: front.idle)
    assert front.upstream.tags == ["first"]


@queued()
async def test_a_client_that_leaves_frees_its_slot_and_stops_the_upstream(front: Front) -> None:
    await front.ask(tag="leaver", max_tokens=4000, leaves_after=3)
    await front.until(lambda: "leaver" in front.upstream.ended)
    assert (await front.ask(**ONE)).status == 200
    await front.until(lambda: front.idle)


@queued(slots=2, send_timeout=0.4)
async def test_clients_that_read_nothing_are_cut_and_do_not_stop_the_others(front: Front) -> None:
    body = json.dumps({"fault": "big", "pieces": 64}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    async with connected(front) as (_, one), connected(front) as (_, two):
        one.write(head + body)
        two.write(head + body)
        await front.until(lambda: len(front.upstream.seen) == 2)
        assert (await front.ask(**ONE)).status == 200
    await front.until(lambda: front.idle)


@queued(max_queue=2)
async def test_a_full_queue_refuses_with_an_estimate(front: Front) -> None:
    first = await front.occupied(1)
    requests = asyncio.create_task(front.all(*({"tag": i, "max_tokens": 10} for i in range(5))))
    await front.until(lambda: front.arrived == 6)
    front.go()
    full = [answer for answer in [*await requests, *await asyncio.gather(*first)] if answer.status == 429]
    assert len(full) == 3
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in full)
    assert len(front.upstream.seen) == 3


@queued(queue_timeout=3.0, request_timeout=6.0)
async def test_the_limits_on_time_hold_in_the_queue_and_in_the_middle_of_an_answer(front: Front) -> None:
    first, waits = await front.all({"tag": "first", "max_tokens": 4000}, {"tag": "waits", **ONE}, in_order=True)
    assert (first.status, waits.status) == (200, 504)
    assert '"timeout_error"' in first.text.splitlines()[-2]
    assert front.upstream.tags == ["first"]
    await front.until(lambda: front.idle)


@queued(request_timeout=4.0)
async def test_the_limit_on_time_holds_before_the_first_byte_and_stops_the_upstream(front: Front) -> None:
    answer = await front.ask(stream=False, max_tokens=4000, tag="whole")
    assert (answer.status, answer.json["error"]["type"]) == (504, "timeout_error")
    await front.until(lambda: "whole" in front.upstream.ended)
    await front.until(lambda: front.idle)


@queued()
async def test_an_answer_of_100_mb_passes_in_pieces(front: Front) -> None:
    tracemalloc.start()
    try:
        async with front.session.post(front.url + CHAT, json={"fault": "big", "pieces": 100}) as answer:
            size = sum([len(piece) async for piece in answer.content.iter_any()])
        assert size == 100 << 20
        assert tracemalloc.get_traced_memory()[1] < 24 << 20  # of upstream, queue and client
    finally:
        tracemalloc.stop()


@queued()
async def test_draining_refuses_new_requests_and_finishes_the_others(front: Front) -> None:
    (open,) = await front.occupied(1)
    front.queue.draining = True
    assert (await front.ask(**ONE)).status == 503
    async with front.session.get(f"{front.url}/ready") as ready:
        assert ready.status == 503
    front.go()
    answer = await open
    assert answer.text.count('" t') == 40
    await front.until(lambda: front.queue.open == 0)


def test_a_kept_connection_that_the_upstream_has_closed_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "STALE_SECONDS", 20.0)

    async def run() -> None:
        async with scripted(1, 0.002) as upstream:
            port = int(upstream.url.rpartition(":")[2])
            async with queueing([upstream], "dynamic", 1, Settings(), {}) as front:
                assert (await front.ask(**ONE)).status == 200
                upstream.closes_next = True
                assert [(await front.ask(tag=i, **ONE)).status for i in range(3)] == [200] * 3
                assert upstream.tags.count("0") == 2
                assert port

    run_async(asyncio.wait_for(run(), 180))


def test_mixed_requests_are_each_answered_once_and_every_slot_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstreams, "PATIENCE_SECONDS", 120.0)  # both upstreams rest again and again
    faults = ["", "", "", "500", "close", "midclose", "miderror", "429"]

    async def test(front: Front) -> None:
        async def one(i: int) -> Answer | None:
            requests = asyncio.create_task(
                front.ask(tag=i, fault=faults[i % 8], after=0.05, max_tokens=3 + i % 5, stream=i % 3 > 0)
            )
            if i % 11 == 5:
                await asyncio.sleep(0.002 * (i % 7))
                requests.cancel()
                return None
            return await requests

        answers = await asyncio.gather(*(one(i) for i in range(200)), return_exceptions=True)
        for i, answer in enumerate(answers):
            if i % 11 == 5:
                continue
            assert isinstance(answer, Answer)
            if i % 8 < 3:
                assert answer.status == 200
        await front.until(lambda: front.idle)

    before(test, "dynamic+vtc", count=2, slots=4, step=0.001)


def test_an_upstream_that_is_killed_and_comes_back_loses_only_what_it_was_computing() -> None:
    async def run() -> None:
        async with (
            scripted(4, 0.005) as alive,
            contextlib.AsyncExitStack() as first,
            contextlib.AsyncExitStack() as second,
        ):
            port = free_port()
            killed = await first.enter_async_context(scripted(4, 0.005, port))
            async with queueing([alive, killed], "dynamic+vtc", 4, Settings(), {}) as front:

                async def one(i: int) -> str:
                    body = {"messages": [], "tag": i, "user": "ab"[i % 2], "stream": i % 3 > 0, "max_tokens": 3 + i % 9}
                    try:
                        async with front.session.post(front.url + CHAT, json=body) as answer:
                            text = b""
                            async for piece in answer.content.iter_any():
                                text += piece
                                await asyncio.sleep(0.005 * (i % 10 == 3))  # a slow reader
                                if i % 10 == 1:
                                    return "left"
                    except aiohttp.ClientError:
                        return "cut"
                    is_whole = text.endswith(b"data: [DONE]\n\n" if body["stream"] else b"}")
                    return "whole" if answer.status == 200 and is_whole and b'"error"' not in text else "failed"

                requests = [asyncio.create_task(one(i)) for i in range(200)]
                await front.until(lambda: len(killed.seen) > 20)
                await first.aclose()
                await asyncio.sleep(0.3)
                alive.going.clear()
                back = await second.enter_async_context(scripted(4, 0.005, port))
                await front.until(lambda: back.seen)
                alive.going.set()
                outcomes = collections.Counter(await asyncio.gather(*requests))
                assert outcomes["left"] == 20
                assert outcomes["cut"] + outcomes["failed"] <= 4  # the slots of the killed one
                assert outcomes.total() == 200
                await front.until(lambda: front.idle)

    run_async(asyncio.wait_for(run(), 180))
