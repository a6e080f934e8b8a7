"""Policies that go by adapters: the order adapter-affinity, and lightllm's memory for each."""

from __future__ import annotations

from scheduling.sequence import Sequence
from tests.support.scheduling import Run, burst, drive, make_scheduler, order_of_admission


def with_adapters(sequences: list[Sequence], adapters: str) -> list[Sequence]:
    """Give each sequence the adapter of its letter; a dot means none."""
    for seq, adapter in zip(sequences, adapters, strict=True):
        seq.adapter = seq.cache_salt = adapter.strip(".")
    return sequences


def most_adapters(run: Run) -> int:
    """Return the most adapters that a step had."""
    return max(len({seq.adapter for seq in plan.sequences} - {""}) for plan in run.plans)


def test_the_batch_keeps_its_adapters_as_long_as_requests_of_them_wait() -> None:
    run = drive(
        make_scheduler("dynamic+adapter-affinity", 2, guard=1000),
        with_adapters(burst((1, 2), (1, 3), (1, 6), (1, 3), (1, 2), (1, 3)), "ababab"),
    )
    assert order_of_admission(run) == ["r0", "r2", "r4", "r1", "r3", "r5"]


def test_requests_without_an_adapter_go_before_those_of_adapters_that_are_not_in_the_batch() -> None:
    run = drive(make_scheduler("dynamic+adapter-affinity", 1, guard=1000), with_adapters(burst(*[(1, 3)] * 5), "ab.a."))
    assert order_of_admission(run) == ["r2", "r4", "r0", "r1", "r3"]


def test_a_batch_has_fewer_adapters_than_in_order_of_arrival() -> None:
    letters = "".join("abcdefgh"[i * 5 % 8] for i in range(64))
    found = {
        order: drive(make_scheduler(f"dynamic{order}", 8, **options), with_adapters(burst(*[(1, 4)] * 64), letters))
        for order, options in (("", {}), ("+adapter-affinity", {"guard": 10_000}))
    }
    assert most_adapters(found[""]) == 8
    assert most_adapters(found["+adapter-affinity"]) == 1
    assert found[""].now == found["+adapter-affinity"].now


def test_lightllm_sets_tokens_aside_for_each_adapter_in_the_batch() -> None:
    def largest_batch(adapters: str) -> int:
        # Two requests of one token that generate 4 reach a peak of 4 x 2 + 2 = 10 tokens.
        scheduler = make_scheduler("lightllm", 4, pool=20, per_adapter=8, max_wait=0)
        run = drive(scheduler, with_adapters(burst((1, 4), (1, 4)), adapters))
        return max(len(plan.sequences) for plan in run.plans)

    assert largest_batch("..") == 2
    assert largest_batch("aa") == 2
    assert largest_batch("a.") == 2
    assert largest_batch("ab") == 1
