"""The simulator: the conventions of time, leaps that change nothing, overheads, and policies that hang."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import policies
from costs import published
from costs.cost import Affine, Cost, Host
from costs.steps import Step
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.best.optimum import Optimum
from simulate.simulator import PolicyHangs, Run, simulate
from tests.support import points
from tests.support.scheduling import drive, make_scheduler, toy_cost
from tests.support.simulate import poisson, sequences
from tests.support.strategies import pools, traces

NAMES = [*policies.names(), "dynamic+vtc", "dynamic+srpt", "lightllm+vtc", "static+sjf"]


class Toy(Cost):
    """10 + prompt tokens + 2 x decoding rows, as the timelines by hand have it."""

    def seconds(self, step: Step) -> float:
        return 10 + step.prompt + 2 * step.decodes


def everything(run: Run) -> list[object]:
    """Return all that a run says, but why who waited, which rounds differently; gaps are in no order."""
    times = [
        (s.id, s.scheduled_at, s.first_token_at, s.last_token_at, s.finished_at, s.computed,
         s.first_iteration, s.last_iteration, s.batch_sum, s.batch_max, len(s.output_ids))
        for s in run.sequences
    ]  # fmt: skip
    return [times, sorted(run.gaps), run.steps, run.busy, run.ended, run.batches]


@pytest.mark.parametrize("name", ["nobatch", "static", "dynamic", "chunked"])
@given(trace=traces(), make_pages=pools(), slots=st.integers(1, 4))
def test_the_simulator_and_the_scheduler_under_test_do_the_same(
    name: str, trace: list, make_pages: object, slots: int
) -> None:
    def fresh() -> list[Sequence]:
        # None of these tokens is in an answer of the tests' driver, since the simulator's answers are in no prompt.
        return [Sequence([100 + t for t in p], n, id=f"r{i}", arrived_at=at) for i, (at, p, n) in enumerate(trace)]

    mine = simulate(Scheduler(policies.get_policy(name, max_batch_size=slots), make_pages()), fresh(), Toy())
    theirs = drive(Scheduler(policies.get_policy(name, max_batch_size=slots), make_pages()), fresh())
    assert [(s.first_token_at, s.finished_at) for s in mine.sequences] == [
        (s.first_token_at, s.finished_at) for s in theirs.sequences
    ]
    assert mine.steps == len(theirs.plans)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("slots", points(1, 3, 1, 32))
@pytest.mark.parametrize("pages", [None, 40])
def test_a_leap_changes_nothing(name: str, slots: int, pages: int | None) -> None:
    rng = np.random.default_rng(slots)
    lengths = rng.integers(1, 40, 60)
    runs = [
        simulate(
            Scheduler(
                policies.get_policy(name, max_batch_size=slots),
                PagePool(pages, 16, prefix_cache=False) if pages else None,
            ),
            poisson(6.0, lengths, np.random.default_rng(3), prompt=9),
            published.make("llm-mock"),
            Host(alpha0=0.001, alpha2=1e-5, sigma=1e-4),
            fast_forward=fast_forward,
        )
        for fast_forward in (False, True)
    ]
    assert everything(runs[0]) == everything(runs[1])
    for before, after in zip(*(run.sequences for run in runs)):
        assert set(before.waited) == set(after.waited)
        for reason, (steps, seconds) in before.waited.items():
            assert after.waited[reason] == (steps, pytest.approx(seconds, abs=1e-9))


def test_constrained_rows_take_the_time_of_their_masks() -> None:
    for fast_forward in (False, True):
        rows = sequences([(0, 5, 10), (0, 5, 20)])
        rows[0].constrained = True
        cost = Affine(base=1.0, mask_row_s=0.25)
        run = simulate(make_scheduler("dynamic", 2), rows, cost, fast_forward=fast_forward)
        assert [seq.finished_at for seq in rows] == [10 * 1.25, 10 * 1.25 + 10]
        assert run.busy == Optimum(rows, cost, 2).least_makespan() == 22.5


def test_a_leap_gives_a_policy_that_listens_each_token_at_its_time() -> None:
    class Listening(Policy):
        def __init__(self, max_batch_size: int) -> None:
            super().__init__(max_batch_size)
            self.heard: list[object] = []

        def on_arrival(self, seq: Sequence, now: float) -> None:
            self.heard.append(("arrival", seq.id, now))

        def on_token(self, seq: Sequence, now: float) -> None:
            self.heard.append(("token", seq.id, now, len(seq.output_ids)))

        def on_finish(self, seq: Sequence, now: float) -> None:
            self.heard.append(("finish", seq.id, now))

    heard = []
    for fast_forward in (False, True):
        policy = Listening(2)
        trace = sequences([(0, 4, 30), (0.2, 3, 20), (0.3, 1, 9), (5, 2, 8)])
        simulate(Scheduler(policy), trace, published.make("constant", {"a": 0.05}), fast_forward=fast_forward)
        heard.append(policy.heard)
    assert heard[0] == heard[1]
    assert len(heard[0]) == 67 + 2 * 4


def test_two_runs_give_the_same_and_records_say_what_happened() -> None:
    def run() -> Run:
        trace = poisson(9.0, np.arange(1, 60), np.random.default_rng(5))
        return simulate(make_scheduler("static", 4), trace, published.make("oracle-a"), records=True)

    first, second = run(), run()
    assert [i.to_dict() for i in first.iterations] == [i.to_dict() for i in second.iterations]
    assert len(first.iterations) == first.steps
    assert sum(i.seconds for i in first.iterations) == pytest.approx(first.busy)
    assert sum(m.phase != "held" for i in first.iterations for m in i.members) == 59 * 60 // 2
    assert all(sum(i.slot_steps) == pytest.approx(4) for i in first.iterations)


def test_littles_law_holds_exactly() -> None:
    run = simulate(
        make_scheduler("dynamic", 8),
        poisson(5.0, np.full(400, 30), np.random.default_rng(1)),
        published.make("oracle-a"),
    )
    events = sorted([(at, 1) for at in run.arrival] + [(at + t, -1) for at, t in zip(run.arrival, run.latency)])
    area, n, last = 0.0, 0, 0.0
    for at, change in events:
        area, n, last = area + n * (at - last), n + change, at
    assert n == 0
    assert area == pytest.approx(run.latency.sum(), rel=1e-9)


def test_ties_come_in_as_they_were_submitted_and_an_arrival_at_the_end_of_a_step_joins_the_next() -> None:
    trace = sequences([(5, 1, 1), (0, 1, 2), (5, 2, 1), (11, 3, 1)])
    run = simulate(make_scheduler("nobatch", 1), trace, Toy())
    assert [s.id for s in run.sequences] == ["r1", "r0", "r2", "r3"]
    assert [s.finished_at for s in run.sequences] == [23, 34, 46, 59]
    run = simulate(make_scheduler("dynamic", 4), sequences([(0, 1, 2), (11, 3, 1)]), Toy())
    assert [s.first_token_at for s in run.sequences] == [11, 26]


def test_host_overheads_lie_where_they_belong() -> None:
    host = Host(alpha0=1.0, alpha1=2.0, alpha2=0.25, sigma=0.5)
    run = simulate(make_scheduler("dynamic", 2), sequences([(0, 4, 3)]), Toy(), host)
    step = 0.5 + 0.25
    assert run.ttft[0] == 1 + 14 + step
    assert run.latency[0] == 1 + 14 + 12 + 12 + 3 * step + 2
    assert run.makespan == run.latency[0]
    assert run.waiting[0] == 1
    assert list(run.gaps) == [12 + step] * 2


def test_an_idle_loop_that_polls_sees_an_arrival_at_its_next_look() -> None:
    run = simulate(make_scheduler("nobatch", 1), sequences([(1, 4, 1), (31, 1, 1)]), Toy(), Host(poll=10))
    assert [s.finished_at for s in run.sequences] == [24, 45]


class Waits(Policy):
    """Lets everybody wait until `until`."""

    until: float | None = None

    def admit(self, waiting: Collection[Sequence], running: list[Sequence], budget: object, now: float) -> int:
        return len(waiting) if self.until is not None and now >= self.until else 0

    def deadline(self, waiting: Collection[Sequence], now: float) -> float | None:
        return self.until


def test_a_deadline_wakes_the_policy() -> None:
    policy = Waits(4)
    policy.until = 7.5
    run = simulate(Scheduler(policy), sequences([(0, 1, 1), (30, 1, 1)]), Toy())
    assert [s.finished_at for s in run.sequences] == [18.5, 41]


class Restless(Waits):
    """Wants to be asked again at once."""

    def deadline(self, waiting: Collection[Sequence], now: float) -> float:
        return now


class Keeps(Policy):
    """Releases nobody."""

    def release(self, running: list[Sequence]) -> list[Sequence]:
        return []


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Waits(4), r"with 1 in its queue.*Return a time"),
        (Restless(4), "100,000 times in a row"),
        (Keeps(4), r"from release\(\)"),
    ],
)
def test_a_policy_that_hangs_is_named(policy: Policy, words: str) -> None:
    with pytest.raises(PolicyHangs, match=words):
        simulate(Scheduler(policy), sequences([(0, 1, 1)]), Toy())


def test_a_run_of_nobody_is_a_run() -> None:
    run = simulate(make_scheduler("dynamic", 4), [], Toy())
    assert (run.steps, len(run.done), run.ended) == (0, 0, 0)


def test_halving_all_costs_and_gaps_halves_all_latencies_exactly() -> None:
    class Halved(Cost):
        def seconds(self, step: Step) -> float:
            return published.make("oracle-a").seconds(step) / 2

    for name in ("static", "dynamic", "chunked", "prefill-first"):
        trace = poisson(8.0, np.arange(1, 80), np.random.default_rng(2))
        whole = simulate(make_scheduler(name, 8), trace, published.make("oracle-a"))
        trace = poisson(8.0, np.arange(1, 80), np.random.default_rng(2))
        for seq in trace:
            seq.arrived_at /= 2
        half = simulate(make_scheduler(name, 8), trace, Halved())
        assert (half.latency * 2 == whole.latency).all()


def test_the_cost_sees_the_plan_that_was_made() -> None:
    plans: list[Plan] = []

    class Watching(Toy):
        def step(self, plan: Plan) -> Step:
            plans.append(plan)
            step = super().step(plan)
            assert self.seconds(step) == toy_cost(plan)
            return step

    simulate(make_scheduler("static", 2), sequences([(0, 4, 3), (5, 8, 1), (6, 2, 5)]), Watching(), fast_forward=False)
    assert len(plans) == 3 + 5


@pytest.mark.parametrize(
    ("host", "arrivals", "lengths", "without", "ends"),
    [
        (Host(receive=0.25), (0.0, 0.5), (3, 1), [3, 2], [3.25, 2.25]),  # a request that comes during a step delays it
        (Host(wake=0.02), (5.0, 5.01), (1, 1), [6, 7], [6.02, 6.02]),  # an idle loop sees all that came before it wakes
        (Host(late=1), (0.0, 0.5), (4, 1), [4, 2], [4, 3]),  # a request that joins others misses a step
    ],
    ids=["receive", "wake", "late"],
)
def test_what_a_host_takes_moves_the_ends_of_answers(
    host: Host, arrivals: tuple[float, ...], lengths: tuple[int, ...], without: list[float], ends: list[float]
) -> None:
    for each, expected in ((Host(), without), (host, ends)):
        rows = [Sequence([i], n, arrived_at=at) for i, (at, n) in enumerate(zip(arrivals, lengths))]
        run = simulate(make_scheduler("dynamic", 2), rows, Affine(base=1.0), each)
        assert [seq.finished_at for seq in run.sequences] == pytest.approx(expected)
