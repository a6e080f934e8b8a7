"""The order dlpm: fair between clients, and the longest cached prefix of those with a deficit."""

from __future__ import annotations

import pytest

from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from tests.support.scheduling import drive, make_scheduler, order_of_admission, requests

HEAD = list(range(8))  # two pages


def admitted(order: str, **options: object) -> list[str]:
    """Return in which order five requests run one by one: r1 and r4 are of client b, and all but r1 begin alike."""
    trace = requests(
        (0, [*HEAD, 90], 1), (1, [*range(50, 55)], 1), (1, [*HEAD, 91], 1), (1, [*HEAD, 92], 1), (1, [*HEAD, 93], 1)
    )
    for seq, client in zip(trace, "abaab"):
        seq.client = client
    return order_of_admission(drive(make_scheduler(f"nobatch+{order}", 1, PagePool(33, 4), **options), trace))


def test_a_round_is_served_by_prefix_step_by_step() -> None:
    """By hand, with a quantum of 6.

    r0 costs a 10 of 6: 4 of debt. Then a round: a has 2, b 6. All but r1 have 8 tokens cached; a was seen first: r2 costs 2, so
    that a has nothing left. b has r4 for 2, then r1 for 6. After the next round, r3 is left.
    """
    assert admitted("dlpm", quantum=6) == ["r0", "r2", "r4", "r1", "r3"]
    assert admitted("lpm") == ["r0", "r2", "r3", "r4", "r1"]
    assert admitted("drr", quantum=6) == ["r0", "r2", "r1", "r4", "r3"]


def test_what_was_cached_costs_nothing() -> None:
    trace = requests((0, [*HEAD, 90], 1), (1, [*HEAD, 91], 1), (1, [*HEAD, 92], 1))
    trace[1].client = trace[2].client = "b"
    debts: list[float] = []

    def planned(scheduler: Scheduler, plan: Plan) -> None:
        if plan.joined == [trace[1]]:
            debts.append(scheduler.policy.counters["b"] + 512)  # type: ignore[attr-defined]

    drive(make_scheduler("nobatch+dlpm", 1, PagePool(33, 4)), trace, planned=planned)
    assert debts == [1]


def with_prompts_of_their_own(count: int) -> list[Sequence]:
    """Return requests of two clients, each with a system prompt of 64 tokens, the heavy one's twice as often."""
    trace = []
    for i in range(count):
        client = "ab"[i % 3 == 2]
        prompt = [ord(client) * 1000 + k for k in range(64)] + [10_000 + i] * 8
        trace.append(Sequence(prompt, 4, id=f"r{i}", client=client, arrived_at=0))
    return trace


@pytest.mark.parametrize(("order", "most"), [("lpm", 0.0), ("vtc", 1.0), ("dlpm", 1.0)])
def test_it_finds_as_much_in_the_cache_as_lpm_and_is_as_fair_as_vtc(order: str, most: float) -> None:
    """With pages for one system prompt at a time, taking turns computes it again and again."""
    trace, both = with_prompts_of_their_own(60), [0, 0]

    def planned(scheduler: Scheduler, plan: Plan) -> None:
        if {seq.client for seq in scheduler.waiting} == {"a", "b"}:
            for seq in plan.joined:
                both[seq.client == "b"] += len(seq.prompt_ids) - seq.cached + 4

    options = {"guard": 1e9} if order == "lpm" else {}
    drive(make_scheduler(f"nobatch+{order}", 1, PagePool(26, 4), **options), trace, planned=planned)
    hits = sum(seq.cached for seq in trace) / sum(len(seq.prompt_ids) for seq in trace)
    assert (hits > 0.7) == (order != "vtc")
    assert (min(both) > 0) == bool(most)
