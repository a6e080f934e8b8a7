"""Who is let through next: the exact order at a scripted upstream, and what two clients get of it."""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted import Front, before, queued

# Tag, max_tokens, priority, slo and client: sent in this order while a longer request runs.
CASES = [(0, 12, 5, 900, "a"), (1, 3, 1, 800, "a"), (2, 9, 3, 100, "a"), (3, 6, 2, 700, "a"), (4, 4, 4, 300, "b"),
         (5, 7, 0, 500, "b"), (6, 2, 9, 200, "c"), (7, 20, 8, 400, "c")]  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "order", "options"),
    [
        ("dynamic", "01234567", {}),
        ("nobatch", "01234567", {}),
        ("dynamic+drr", "01234567", {}),
        ("dynamic+sjf", "61435207", {}),
        ("dynamic+edf", "26475310", {}),
        ("dynamic+priority", "51324076", {}),
        ("dynamic+vtc", "04675123", {}),
        ("dynamic+rpm", "0124567", {"policy_option": "limit=3"}),
    ],
)
def test_a_policy_decides_who_is_next_at_the_upstream(policy: str, order: str, options: dict[str, Any]) -> None:
    async def test(front: Front) -> None:
        (first,) = await front.occupied(1, 60)
        asks = [
            {"tag": tag, "max_tokens": tokens, "user": user,
             "headers": {"X-Queue-Priority": str(priority), "X-Queue-Slo": str(slo)}}
            for tag, tokens, priority, slo, user in CASES
        ]  # fmt: skip
        answers = await front.all(*asks, in_order=True)
        assert "".join(tag for tag in front.upstream.tags if tag != "first") == order
        assert [str(tag) for tag, answer in enumerate(answers) if answer.status == 200] == sorted(order)
        assert {answer.status for answer in answers} <= {200, 429}
        await first
        await front.until(lambda: front.idle)

    before(test, policy, step=0.003, **options)


@pytest.mark.parametrize(("policy", "least", "most"), [("dynamic+vtc", 0.6, 1.6), ("dynamic", 0.0, 0.4)])
def test_two_clients_get_equal_numbers_of_tokens_under_vtc_alone(policy: str, least: float, most: float) -> None:
    asks = [{"user": "alice", "max_tokens": 10 + i % 5, "tag": f"a{10 + i % 5}"} for i in range(24)]
    asks += [{"user": "bob", "max_tokens": 4 + i % 4, "tag": f"b{4 + i % 4}"} for i in range(16)]

    async def test(front: Front) -> None:
        first = await front.occupied(4)
        requests = asyncio.create_task(front.all(*asks))
        await front.until(lambda: front.queue.manager.waiting == len(asks))
        front.go()
        await asyncio.gather(requests, *first)
        order = front.upstream.tags
        last = max(i for i, tag in enumerate(order) if tag[0] == "b")
        alice, bob = (sum(int(tag[1:]) for tag in order[:last] if tag[0] == client) for client in "ab")
        assert least < bob / alice < most

    before(test, policy, slots=4, step=0.003)


@queued("dynamic+program-fcfs")
async def test_the_program_that_began_first_goes_first(front: Front) -> None:
    first = await front.occupied(1)
    names: list[Any] = [{"program": "p"}, {"headers": {"X-Session-Id": "s"}}, {"headers": {"X-Parent-Session-Id": "p"}}]
    requests = []
    for tag, name in enumerate(names):
        requests.append(asyncio.create_task(front.ask(tag=tag, max_tokens=2, **name)))
        await front.until(lambda: front.queue.manager.waiting == len(requests))
    front.go()
    await asyncio.gather(*first, *requests)
    assert front.upstream.tags == ["first", "0", "2", "1"]


@queued("dynamic+adapter-affinity", slots=2)
async def test_an_upstream_that_swaps_models_swaps_them_seldom(front: Front) -> None:
    asks = [{"model": ["llama", "qwen", "gemma"][i % 3], "tag": f"{i % 3}{i}", "max_tokens": 3} for i in range(18)]
    first = await front.occupied(2, model="llama")
    requests = asyncio.create_task(front.all(*asks))
    await front.until(lambda: front.queue.manager.waiting == 18)
    front.go()
    await asyncio.gather(requests, *first)
    order = [tag[0] for tag in front.upstream.tags if not tag.startswith("first")]
    assert sum(a != b for a, b in itertools.pairwise(order)) < 10  # 17 in order of arrival


@queued(count=2, slots=2)
async def test_two_upstreams_share_one_queue(front: Front) -> None:
    answers = await front.all(*({"max_tokens": 3, "tag": i} for i in range(12)), in_order=True)
    assert {answer.headers["X-Upstream"] for answer in answers} == {"u0", "u1"}
    assert min(len(upstream.seen) for upstream in front.upstreams) >= 4


@queued(count=2, slots=2)
async def test_an_upstream_that_refuses_rests_while_the_other_serves_and_comes_back(front: Front) -> None:
    assert (await front.ask(fault="429", after=0.3, max_tokens=3)).headers["X-Upstream"] in ("u0", "u1")
    await front.until(lambda: all(rest.is_over for site in front.queue.sites.all for rest in site.rests.values()))
    await front.until(lambda: front.queue.manager.slot_cap == 4)
    answers = await front.all(*({"max_tokens": 3, "tag": i} for i in range(8)), in_order=True)
    assert {answer.headers["X-Upstream"] for answer in answers} == {"u0", "u1"}


@queued(slots=3)
async def test_no_more_than_its_slots_run_at_an_upstream(front: Front) -> None:
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, len(front.upstream.running))
            await asyncio.sleep(0.001)

    watching = asyncio.create_task(watch())
    first = await front.occupied(3, 5)
    waiting = asyncio.create_task(front.all(*({"max_tokens": 5, "tag": i} for i in range(12))))
    await front.until(lambda: front.queue.manager.waiting == 12)
    front.go()
    answers = [*await waiting, *await asyncio.gather(*first)]
    watching.cancel()
    assert most == 3
    assert {answer.status for answer in answers} == {200}


@queued()
async def test_a_policy_is_switched_while_requests_wait(front: Front) -> None:
    (first,) = await front.occupied(1)
    waiting = asyncio.create_task(front.all(*({"max_tokens": n, "tag": n} for n in (9, 3, 6))))
    await front.until(lambda: front.queue.manager.waiting == 3)
    switched = await front.send("PUT", "/policy", {"Content-Type": "application/json"}, b'{"policy": "dynamic+sjf"}')
    assert switched.json["policy"] == "dynamic+sjf"
    front.go()
    await asyncio.gather(first, waiting)
    assert front.upstream.tags == ["first", "3", "6", "9"]


@pytest.mark.parametrize("order", ["srpt", "mlfq", "lpm"])
@queued()
async def test_a_policy_that_means_something_else_there_is_refused_with_a_sentence(front: Front, order: str) -> None:
    body = f'{{"policy": "dynamic+{order}"}}'.encode()
    answer = await front.send("PUT", "/policy", {"Content-Type": "application/json"}, body)
    assert answer.status == 400
    assert order in answer.json["error"]["message"]
    known = (await front.send("GET", "/policy")).json
    assert order not in known["orders"]
    assert next(iter(known["policies"])) == "dynamic"


@pytest.mark.parametrize(
    ("policy", "named", "unnamed"),
    [("dynamic+srp", "vtc-pred", "srpt"), ("mine.py", "./eb queue mine.py", "./server.sh")],
)
@queued()
async def test_an_unknown_policy_is_refused_with_what_a_queue_offers(
    front: Front, policy: str, named: str, unnamed: str
) -> None:
    body = f'{{"policy": "{policy}"}}'.encode()
    answer = await front.send("PUT", "/policy", {"Content-Type": "application/json"}, body)
    assert answer.status == 400
    assert named in answer.text
    assert unnamed not in answer.text


@queued(slots=2)
async def test_more_answers_at_once_than_there_are_slots_are_refused(front: Front) -> None:
    answer = await front.ask(n=3, max_tokens=2)
    assert (answer.status, front.upstream.seen) == (400, [])
    assert "n up to 2" in answer.text
    assert (await front.ask(n=2, max_tokens=2)).status == 200


@queued(slots=3)
async def test_a_request_takes_a_slot_for_each_of_its_answers_and_nobody_overtakes_it(front: Front) -> None:
    asks = [
        {"tag": i, "n": n, "max_tokens": tokens} for i, (n, tokens) in enumerate([(2, 10), (1, 40), (3, 5), (1, 5)])
    ]
    requests = asyncio.create_task(front.all(*asks, in_order=True))
    await front.until(lambda: "0" in front.upstream.ended)
    assert front.upstream.tags == ["0", "1"]
    await requests
    assert front.upstream.tags == ["0", "1", "2", "3"]
    assert front.upstream.ended["1"] < front.upstream.ended["2"]
    await front.until(lambda: front.idle)


@pytest.mark.parametrize("policy", ["nobatch", "static", "dynamic+vtc", "adaptive"])
def test_requests_for_several_answers_are_served_by_each_loop_where_there_is_room(policy: str) -> None:
    async def test(front: Front) -> None:
        numbers = [1, 2, 3, 1, 3, 2, 1, 1]
        answers = await front.all(*({"tag": i, "n": n, "max_tokens": 4} for i, n in enumerate(numbers)))
        assert {answer.status for answer in answers} == {200}
        assert {answer.headers["X-Upstream"] for answer, n in zip(answers, numbers) if n > 1} == {"u1"}
        await front.until(lambda: front.idle)

    before(test, policy, slots=(1, 3), count=2)


@queued("dynamic+sjf")
async def test_a_policy_that_raises_gives_way_to_dynamic_and_no_request_is_lost(front: Front) -> None:
    policy = front.queue.manager.policy
    assert policy is not None
    (first,) = await front.occupied(1)
    requests = asyncio.create_task(front.all(*({"max_tokens": 4, "tag": i} for i in range(6))))
    await front.until(lambda: front.queue.manager.waiting == 6)
    policy.order = lambda waiting, now: sys.exit()  # type: ignore[assignment, method-assign, return-value]
    front.go()
    answers = [await first, *await requests]
    assert {answer.status for answer in answers} == {200}
    assert front.queue.manager.policy_name == "dynamic"
    assert front.queue.manager.fallback.failures == 1


def test_a_file_of_the_user_called_dynamic_is_no_built_in_policy(tmp_path: Path) -> None:
    (tmp_path / "dynamic.py").write_text("from policies.dynamic import Policy as Base\n\nclass Policy(Base): pass\n")

    async def test(front: Front) -> None:
        await front.until(lambda: "_own" in type(front.queue.manager.policy).__module__)

    before(test, str(tmp_path / "dynamic.py"))
