"""Several upstreams on one queue: rows, order, failures, switches, and what is simulated of them."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from scripted import Front, before, queued

from scheduling.iteration import Iteration
from serving.inference import Inference

JSON = {"Content-Type": "application/json"}
CASES = [(0, 12), (1, 3), (2, 9), (3, 6), (4, 4), (5, 7), (6, 2), (7, 20)]  # tag and max_tokens


def watched(front: Front) -> tuple[list[Inference], list[Iteration]]:
    """Return the requests and the steps of a queue, as they come."""
    requests: list[Inference] = []
    steps: list[Iteration] = []
    front.queue.manager.listeners.append(requests.append)
    front.queue.manager.observers.append(lambda step, left: None if step is None else steps.append(step))
    return requests, steps


def joined(requests: list[Inference]) -> list[Inference]:
    return sorted(requests, key=lambda one: one.sequence.scheduled_at or 0.0)


@queued(count=2, slots=(1, 3))
async def test_a_step_is_of_one_upstream_and_has_its_rows_alone(front: Front) -> None:
    _, steps = watched(front)
    answers = await front.all(*({"max_tokens": 6, "tag": i} for i in range(12)), in_order=True)
    assert {answer.status for answer in answers} == {200}
    assert {step.rows for step in steps} == {(0, 1), (1, 4)}
    for step in steps:
        assert step.rows is not None
        assert all(step.rows[0] <= member.slot < step.rows[1] for member in step.members)
        assert sum(step.slot_steps) == step.rows[1] - step.rows[0]
    assert [step.n for step in steps] == list(range(1, len(steps) + 1))
    assert len((await front.send("GET", "/slots")).json) == 4
    assert (await front.send("GET", "/policy")).json["max_batch_size"] == 4


@pytest.mark.parametrize(("policy", "order"), [("dynamic", "01234567"), ("dynamic+sjf", "61435207")])
def test_the_next_request_is_the_first_of_the_one_queue_whichever_upstream_has_a_slot(policy: str, order: str) -> None:
    async def test(front: Front) -> None:
        first = await front.occupied(2)
        requests, _ = watched(front)
        await front.all(*({"tag": tag, "max_tokens": tokens} for tag, tokens in CASES), in_order=True)
        assert "".join(str(requests.index(one)) for one in joined(requests)) == order
        await asyncio.gather(*first)
        await front.until(lambda: front.idle)

    before(test, policy, count=2)


@queued("dynamic+vtc", count=2)
async def test_what_a_client_got_at_one_upstream_counts_at_the_other(front: Front) -> None:
    first = await front.occupied(2)
    requests, _ = watched(front)
    asks = [{"user": "alice", "max_tokens": 6}] * 8 + [{"user": "bob", "max_tokens": 6}] * 4
    await front.all(*asks, in_order=True)
    clients = [one.sequence.client for one in joined(requests)]
    assert all(set(clients[i : i + 2]) == {"alice", "bob"} for i in range(0, 8, 2))
    await asyncio.gather(*first)


@queued(count=2, slots=2)
async def test_an_upstream_that_is_down_costs_no_request_and_the_other_serves_all(front: Front) -> None:
    front.hold()
    requests = asyncio.create_task(front.all(*({"max_tokens": 8, "tag": i} for i in range(16))))
    await front.until(lambda: all(len(one.running) == 2 for one in front.upstreams))
    front.queue.sites.all[0].url = "http://127.0.0.1:9"
    front.go()
    answers = await requests
    assert {answer.status for answer in answers} == {200}
    assert sum(answer.headers["X-Upstream"] == "u1" for answer in answers) >= 12
    await front.until(lambda: front.idle)


@queued(count=2, slots=2)
async def test_a_policy_is_switched_under_load_for_all_upstreams_at_once(front: Front) -> None:
    first = await front.occupied(4)
    requests, steps = watched(front)
    sending = asyncio.create_task(front.all(*({"max_tokens": n, "tag": n} for n in (9, 3, 6, 12, 2))))
    await front.until(lambda: front.queue.manager.waiting == 5)
    limit = front.queue.manager.max_queue
    for policy in ("nobatch", "static", "dynamic+sjf"):
        answer = await front.send("PUT", "/policy", JSON, json.dumps({"policy": policy}).encode())
        assert answer.json["max_batch_size"] == (2 if policy == "nobatch" else 4)
    assert front.queue.manager.max_queue == limit
    front.go()
    await asyncio.gather(sending, *first)
    assert [one.num_tokens for one in joined(requests)] == [2, 3, 6, 9, 12]
    assert {step.policy for step in steps[-5:]} == {"dynamic+sjf"}


@queued(count=2, slots=2)
async def test_all_slots_are_reported_as_usable_while_requests_join_one_by_one(front: Front) -> None:
    caps: set[int] = set()
    front.queue.manager.observers.append(lambda step, left: caps.add(front.queue.manager.slot_cap))
    await front.all(*({"max_tokens": 4, "tag": i} for i in range(8)))
    assert caps == {4}


@queued("static", count=2, slots=2)
async def test_a_closed_loop_fills_a_batch_at_each_upstream(front: Front) -> None:
    requests, steps = watched(front)
    answers = await front.all(*({"max_tokens": 4 + i, "tag": i} for i in range(8)), in_order=True)
    assert {answer.status for answer in answers} == {200}
    for step in steps:
        assert not (step.joined and step.left)  # nobody takes the place of one that left before the others
    assert {one.sequence.slot // 2 for one in requests} == {0, 1}


@queued(count=2, slots=2)
async def test_what_if_simulates_as_many_engines_and_says_how_far_it_is_off(front: Front) -> None:
    await front.all(*({"max_tokens": 4 + i % 9, "tag": i} for i in range(24)), in_order=True)
    await front.until(lambda: front.idle)
    what_if = await front.what_if(24)
    assert (what_if["slots"], what_if["engines"], what_if["bound"]) == (4, 2, None)
    assert set(what_if["error"]) == {"latency_mean_s", "latency_p99_s", "makespan_s"}
    measured, again, sjf = what_if["lanes"]
    assert measured["requests"] == again["requests"] == sjf["requests"]
    for lane in what_if["lanes"]:
        assert {tuple(record["rows"]) for record in lane["records"]} == {(0, 2), (2, 4)}
        numbers = [record["n"] for record in lane["records"]]
        assert numbers == sorted(set(numbers))
    assert sjf["latency_mean_s"] < again["latency_mean_s"]


@pytest.mark.parametrize("count", [1, 2])
def test_a_place_in_the_queue_is_that_in_the_order_of_the_policy(count: int) -> None:
    async def test(front: Front) -> None:
        await front.all(*({"max_tokens": 9} for _ in range(4)))  # so that the queue knows how long a token takes
        first = await front.occupied(count)
        asks = [{"headers": {"X-Request-Id": f"w{tokens}"}, "max_tokens": tokens} for tokens in (30, 5, 20)]
        waiting = [asyncio.create_task(front.ask(**ask)) for ask in asks]
        await front.until(lambda: len(front.queue.manager.scheduler.waiting) == 3)
        places = {id: (await front.send("GET", f"/queue/position?id={id}")).json for id in ("w5", "w20", "w30")}
        assert {id: place["before"] for id, place in places.items()} == {"w5": 0, "w20": 1, "w30": 2}
        waits = [place["expected_wait_s"] for place in places.values()]
        assert 0 < waits[0] < waits[1] < waits[2]  # the first one waits for the running one
        front.go()
        await asyncio.gather(*waiting, *first)

    before(test, "dynamic+sjf", count=count)


@queued()
async def test_an_answer_without_a_length_is_expected_to_be_as_long_as_earlier_ones_of_its_model(front: Front) -> None:
    manager = front.queue.manager
    await front.all(*({"real": 9} for _ in range(4)))
    await front.until(lambda: front.idle)
    front.hold()
    requests = [asyncio.create_task(front.ask(real=9))]
    await front.until(lambda: front.upstream.running)
    for i, model in enumerate(("", "", "new", "")):
        requests.append(asyncio.create_task(front.ask({"X-Request-Id": f"w{i}"}, real=9, model=model)))
        await front.until(lambda: len(manager.scheduler.waiting) == len(requests) - 1)
    waits = [(await front.send("GET", f"/queue/position?id=w{i}")).json["expected_wait_s"] for i in range(4)]
    assert 0 < waits[0] < waits[1] < waits[2] < manager.inbox.rate.seconds_for(100)
    assert waits[3] > manager.inbox.rate.seconds_for(front.queue.settings.context)
    front.go()
    await asyncio.gather(*requests)


@queued()
async def test_a_wait_is_unknown_until_the_upstream_has_sent_a_token(front: Front) -> None:
    first = await front.occupied(1)
    waiting = asyncio.create_task(front.ask({"X-Request-Id": "w"}, max_tokens=2))
    await front.until(lambda: front.queue.manager.scheduler.waiting)
    assert (await front.send("GET", "/queue/position?id=w")).json["expected_wait_s"] is None
    front.go()
    await asyncio.gather(waiting, *first)


@queued("dynamic+sjf", max_queue=2)
async def test_a_full_queue_tells_a_short_request_to_come_back_sooner_where_it_would_go_first(front: Front) -> None:
    _, steps = watched(front)
    (first,) = await front.occupied(1, 1000)
    front.go()
    await front.until(lambda: len(steps) > 5)
    front.hold()  # the first one stays, however long the others take
    waiting = asyncio.create_task(front.all(*({"max_tokens": 400, "tag": i} for i in range(2))))
    await front.until(lambda: len(front.queue.manager.scheduler.waiting) == 2)
    front.queue.manager.inbox.rate.add(10_000, 100.0)  # on a busy machine, tokens arrive together
    refused = [await front.ask(max_tokens=tokens) for tokens in (3, 500)]
    assert [answer.status for answer in refused] == [429, 429]
    short, long = (int(answer.headers["Retry-After"]) for answer in refused)
    assert short < long
    waiting.cancel()
    first.cancel()


@queued("dynamic+edf", max_queue=1)
async def test_a_refused_request_is_told_its_place_by_its_own_deadline(front: Front) -> None:
    front.queue.manager.inbox.rate.add(100, 1.0)  # so that the queue knows how long a token takes
    first = await front.occupied(1)
    waiting = asyncio.create_task(front.ask(max_tokens=2000, slo_s=60))
    await front.until(lambda: len(front.queue.manager.scheduler.waiting) == 1)
    late = await front.ask(max_tokens=9, slo_s=100)
    front.queue.manager._sorts_at = 0.0  # or the second gets the order found for the first
    soon = await front.ask(max_tokens=9, slo_s=1)
    assert [answer.status for answer in (soon, late)] == [429, 429]
    assert int(soon.headers["Retry-After"]) < int(late.headers["Retry-After"])
    for task in (waiting, *first):
        task.cancel()


@queued("dynamic+sjf")
async def test_requests_that_the_loop_has_not_seen_yet_are_ahead_too(front: Front) -> None:
    await front.all(*({"max_tokens": 9} for _ in range(4)))  # so that the queue knows how long a token takes
    first, manager = await front.occupied(1), front.queue.manager
    short, long, new = (Inference("", tokens, [0] * 7) for tokens in (3, 400, 20))
    for one in (short, long, new):
        one.attach(manager.inbox, time.perf_counter())
    with manager.inbox.changed:  # the loop takes nothing in
        manager.inbox.arrived += [long, short]
        ahead, seconds = manager.before(new.sequence)
        assert (ahead, manager.queued) == ([short.sequence], [long.sequence, short.sequence])
        assert seconds == pytest.approx(manager.before(short.sequence)[1] + manager.inbox.rate.seconds_for(10))
        manager.inbox.arrived.clear()
    front.go()
    await asyncio.gather(*first)
