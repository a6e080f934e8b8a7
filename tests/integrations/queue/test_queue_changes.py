"""Upstreams that come and go while the queue runs: none is needed for requests to wait, and one that leaves loses none."""

from __future__ import annotations

import asyncio
import json

import pytest
from scripted import CHAT, Answer, Front, before, queued

from integrations.queue.sites import Site

JSON = {"Content-Type": "application/json"}


def only(front: Front, *numbers: int, slots: int = 2) -> None:
    """Have the queue use these of the scripted upstreams."""
    known = {site.name: site for site in front.queue.sites.all}
    front.queue.manager.update([known.get(f"u{i}") or Site(f"u{i}", front.upstreams[i].url, slots) for i in numbers])


async def settled(front: Front, slots: int) -> None:
    await front.until(lambda: front.queue.manager.max_batch_size == slots)


@pytest.mark.parametrize("policy", ["dynamic+sjf", "dynamic+admission-control", "static"])
def test_requests_wait_while_there_is_no_upstream(policy: str) -> None:
    async def test(front: Front) -> None:
        only(front)
        await settled(front, 0)
        assert (await front.send("GET", "/health")).status == 503
        requests = asyncio.create_task(front.all(*({"max_tokens": n, "tag": n} for n in (9, 3, 6)), in_order=True))
        await front.until(lambda: front.queue.manager.waiting == 3)
        only(front, 0, 1)
        assert {answer.status for answer in await requests} == {200}
        assert (await front.send("GET", "/health")).status == 200
        await front.until(lambda: front.idle)
        assert front.queue.manager.max_queue == 1024

    before(test, policy, count=2, slots=2, usual=2)


@queued(count=2, slots=2, usual=2)
async def test_an_upstream_that_leaves_finishes_its_requests_and_gets_no_more(front: Front) -> None:
    tasks = await front.occupied(4, 60)
    only(front, 1)
    front.go()
    answers = await front.all(*({"max_tokens": 4, "tag": "later"} for _ in range(6)))
    assert {answer.headers["X-Upstream"] for answer in answers} == {"u1"}
    assert sorted(answer.headers["X-Upstream"] for answer in await asyncio.gather(*tasks)) == ["u0", "u0", "u1", "u1"]
    await settled(front, 2)
    assert front.queue.manager.named == [("u1", 2)]
    assert (await front.send("GET", "/upstream/u0/v1/models")).status == 404


@queued(count=2, slots=2, usual=2)
async def test_an_upstream_that_comes_back_has_its_slots_again(front: Front) -> None:
    sites = front.queue.sites.all
    for now, slots in ((sites[1:], 2), (sites, 4)):
        front.queue.manager.update(now)
        await settled(front, slots)
    answers = await front.all(*({"max_tokens": 9, "tag": i} for i in range(8)), in_order=True)
    assert {answer.headers["X-Upstream"] for answer in answers} == {"u0", "u1"}


@queued(count=3, slots=2, usual=2)
async def test_an_upstream_that_comes_takes_free_numbers_and_the_policy_of_the_others(front: Front) -> None:
    only(front, 1)
    await settled(front, 2)
    answer = await front.send("PUT", "/policy", JSON, b'{"policy": "dynamic+sjf"}')
    assert answer.status == 200
    only(front, 1, 2)
    await settled(front, 4)
    assert front.queue.manager.named == [("u1", 2), ("u2", 0)]
    assert {one.scheduler.policy.name for one in front.queue.manager.each} == {"dynamic+sjf"}
    answers = await front.all(*({"max_tokens": 9, "tag": i} for i in range(8)), in_order=True)
    assert {answer.headers["X-Upstream"] for answer in answers} == {"u1", "u2"}


@queued(count=3, slots=2, usual=2)
async def test_upstreams_that_change_under_load_cost_no_request(front: Front) -> None:
    requests = asyncio.create_task(front.all(*({"max_tokens": 4 + i % 5, "tag": i} for i in range(60))))
    for numbers in ((0,), (), (1, 2), (2,), (0, 1), (0, 1, 2)) * 2:
        only(front, *numbers)
        await asyncio.sleep(0.02)
    assert {answer.status for answer in await requests} == {200}
    assert sum(len(one.seen) for one in front.upstreams) == 60
    await settled(front, 6)
    await front.until(lambda: front.idle)


@queued("dynamic+admission-control", count=2, slots=2)
async def test_an_arrival_is_estimated_with_the_free_slots_of_all_upstreams(front: Front) -> None:
    for _ in range(2):
        await front.all(*({"max_tokens": 30, "tag": i} for i in range(4)))
        assert (await front.ask({"X-Queue-Slo": "500"}, max_tokens=4)).status == 200
    assert (await front.send("GET", "/policy")).json["last_failure"] is None


@queued(usual=2)
async def test_more_answers_than_an_upstream_that_comes_later_has_slots_are_refused(front: Front) -> None:
    only(front)
    assert (await front.ask(path=CHAT, n=3)).status == 400


@queued(count=2, slots=2, usual=2)
async def test_what_if_simulates_the_upstreams_that_there_are_and_what_they_served(front: Front) -> None:
    await front.all(*({"max_tokens": 4 + i % 9, "tag": i} for i in range(8)))
    only(front, 1)
    await settled(front, 2)
    assert (await front.send("POST", "/what-if", JSON, b'{"policies": ["dynamic+sjf"]}')).status == 404
    await front.all(*({"max_tokens": 4 + i % 9, "tag": i} for i in range(12)), in_order=True)
    await front.until(lambda: front.idle)
    answer = await front.what_if(12)
    assert (answer["slots"], answer["engines"]) == (2, 1)


@queued(policy="dynamic+sjf", count=2, slots=1)
async def test_a_policy_is_leased_for_all_upstreams_and_what_it_served_is_told(front: Front) -> None:
    own = front.queue.manager.policy

    async def put(**fields: object) -> Answer:
        return await front.send("PUT", "/policy", JSON, json.dumps({"policy": "dynamic+vtc", **fields}).encode())

    await front.all(*({"max_tokens": 3, "user": user} for user in "aab"))
    lease = json.loads((await put(for_s=600)).text)["lease"]
    await front.all(*({"max_tokens": 3, "user": user} for user in "ab"))
    assert ((await put()).status, (await put(for_s=600, lease=lease)).status) == (409, 200)
    await front.until(lambda: front.idle)
    told = json.loads((await front.send("GET", "/served")).text)
    assert [one["policy"] for one in told["ended"]] == ["dynamic+sjf"] * 3 + ["dynamic+vtc"] * 2
    assert {one["tokens"] for one in told["ended"]} == {3}
    assert len({one["client"] for one in told["ended"]}) == 2
    assert (await front.send("DELETE", "/policy/lease")).status == 200
    assert front.queue.manager.policy is own
