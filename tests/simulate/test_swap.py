"""Swapping instead of recomputing in the simulator, against a run worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

import policies
from costs import published
from costs.cost import Cost, Transfer
from costs.steps import Step
from scheduling.driver import tokens_due
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate import workloads
from simulate.simulator import Run, simulate
from simulate.swap import SwapSpace
from tests.support.simulate import sequences


class Toy(Cost):
    """10 + prompt tokens + 2 x decoding rows."""

    flat = True

    def seconds(self, step: Step) -> float:
        return 10.0 + step.prompt + 2 * step.decodes


def served(space: int | None, *, fast_forward: bool = True) -> tuple[Run, Scheduler]:
    """Serve two requests of 4 + 6 tokens with 6 pages of 2 tokens, each of which takes 1 to move."""
    policy = policies.get_policy("dynamic", 2, {"reserve": "prompt"})
    policy.margin = 1
    pages = PagePool(7, 2, prefix_cache=False)
    scheduler = Scheduler(policy, pages)
    if space is not None:
        scheduler.batch.pages = SwapSpace(pages, Transfer(1000, 1000.0), space)
    return simulate(scheduler, sequences([(0, 4, 6), (0, 4, 6)]), Toy(), fast_forward=fast_forward), scheduler


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize(
    ("space", "ends"),
    [
        # Both: 18 for the prompts, 14 for two decodes; before the third step, r1 is preempted with 3 pages and 5 tokens in them.
        (None, [80.0, 132.0]),  # 4 x 12; then 10 + 6 for the tokens of r1 again, and 3 x 12
        (6, [86.0, 140.0]),  # 6 to move them out, 4 x 12; then 6 to move them in, and 4 x 12 to go on
        (5, [80.0, 132.0]),  # 3 pages do not fit into 5 tokens: recomputed
    ],
)
def test_swapping_costs_what_it_moves_and_recomputing_what_it_computes(
    space: int | None, ends: list[float], fast_forward: bool
) -> None:
    run, scheduler = served(space, fast_forward=fast_forward)
    assert [seq.finished_at for seq in run.sequences] == ends
    assert [seq.preemptions for seq in run.sequences] == [0, 1]
    assert run.tokens.tolist() == [6, 6]
    assert run.busy == run.makespan
    assert scheduler.pages is not None
    assert scheduler.pages.used == 0


def test_a_token_that_was_never_computed_is_not_moved_out() -> None:
    """The first request computes 2 tokens of the head in each step; the second waits for all 8."""
    pages = PagePool(21, 2)
    scheduler = Scheduler(policies.get_policy("dynamic", 2), pages, 3)
    scheduler.batch.pages = swap = SwapSpace(pages, Transfer(1000, 1000.0), 100)
    writer, reader = (Sequence([*range(8), last], 4, id=str(last)) for last in (8, 9))
    moved = []
    for seq in (writer, reader):
        scheduler.add(seq)
    for now in range(2):
        plan = scheduler.plan(now)
        assert plan is not None
        assert reader.computed == 8
        scheduler.preempt(plan, [reader], now)
        moved.append(swap.seconds())
        scheduler.commit(plan, tokens_due(plan), now + 1)
    assert moved == [0.0, 2.0]


def test_a_token_that_another_request_will_compute_is_moved_in() -> None:
    pages = PagePool(11, 2)
    swap = SwapSpace(pages, Transfer(1000, 1000.0), 100)
    first, last, large = (Sequence([*range(begin, begin + 9)], 4) for begin in (0, 0, 100))
    for seq, tokens in ((first, 10), (large, 20)):  # the large one takes all pages
        swap.hash(seq)
        assert swap.reserve(seq, tokens)
        seq.computed = 9
        swap.release(seq)
    assert swap.seconds() == 20.0
    for seq in (last, first):
        swap.hash(seq)
        assert swap.reserve(seq, 10)
    assert swap.seconds() == 10.0


def opt(gbps: float | None) -> float:
    """Return the makespan of OPT-13B with little KV; `gbps` is for swapping, None to recompute."""
    rows = workloads.draw("orca", 1.0, 60, seed=1, arrivals="burst")
    policy = policies.get_policy("dynamic", 32, {"reserve": "prompt"})
    policy.margin = 1
    pages = PagePool(151, 16, prefix_cache=False)
    scheduler = Scheduler(policy, pages)
    if gbps is not None:
        scheduler.batch.pages = SwapSpace(pages, Transfer(819_200, gbps * 1e9 / 8), 1 << 30)
    run = simulate(scheduler, rows.sequences(), published.make("distserve-opt13b"))
    assert sum(seq.preemptions for seq in run.sequences) > 5
    return run.makespan


def test_swapping_wins_where_moving_a_token_twice_takes_less_than_computing_it() -> None:
    """A prompt token of OPT-13B takes 0.102 ms, as long as 819,200 bytes out and in at 128 Gbit/s."""
    assert 1000 * 2 * Transfer(819_200, 16e9).seconds(1) == pytest.approx(0.1024)
    makespans = [opt(gbps) for gbps in (1024, 256, 32, 8)]
    assert all(a < b for a, b in pairwise(makespans))
    assert makespans[1] < opt(None) < makespans[3]
