"""The smallest simulator: a scheduler, a clock that only steps move, a toy cost, and faults on demand.

It keeps its own books and checks the scheduler against them after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

from hypothesis import strategies as st

import policies
from scheduling.iteration import Iteration, Plan
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Output, Scheduler
from scheduling.sequence import Sequence

Request = tuple[int, int | list[int], int]  # arrival, prompt (or its length), output tokens


def requests(*trace: Request) -> list[Sequence]:
    """Return a sequence for each request; a prompt given by its length is 0, 1, 2 ..."""
    return [
        Sequence(
            list(range(prompt)) if isinstance(prompt, int) else list(prompt), output, id=f"r{i}", arrived_at=arrival
        )
        for i, (arrival, prompt, output) in enumerate(trace)
    ]


def scheduler(policy: str, slots: int, pages: PagePool | None = None, budget: int = 1 << 30) -> Scheduler:
    return Scheduler(policies.get_policy(policy, max_batch_size=slots), pages, budget)


def prompt_tokens(plan: Plan) -> int:
    """Return the prompt tokens that a step computes, padding with them."""
    counts = [n for seq, n in zip(plan.sequences, plan.counts) if seq.is_prefilling]
    return sum(counts) + plan.padding


def toy_cost(plan: Plan) -> int:
    """Return the milliseconds of a step: 10 + prompt tokens + 2 x decoding rows, held ones too."""
    decodes = sum(1 for seq in plan.sequences if not seq.is_prefilling) + len(plan.held)
    return 10 + prompt_tokens(plan) + 2 * decodes


def next_tokens(plan: Plan) -> list[Output]:
    """Return for each sequence that is due the number of tokens it has."""
    return [len(seq.output_ids) if count == seq.pending else None for seq, count in zip(plan.sequences, plan.counts)]


@dataclass
class Run:
    """A finished run: `events` are (time, change of the number in system), as arrivals and records tell."""

    scheduler: Scheduler
    sequences: list[Sequence]
    now: int = 0
    plans: list[Plan] = field(default_factory=list)
    iterations: list[Iteration] = field(default_factory=list)
    events: list[tuple[int, int]] = field(default_factory=list)
    added: list[Sequence] = field(default_factory=list)
    most_slots: int = 0  # of the policies so far: who runs in a switch may stay beyond the new one's slots

    @property
    def held(self) -> float:
        return sum(it.slot_steps.held for it in self.iterations)

    def records(self) -> list[dict]:
        return [it.to_dict() for it in self.iterations]


def drive(
    scheduler: Scheduler,
    sequences: list[Sequence],
    *,
    forward: Callable[[Plan], list[Output]] = next_tokens,
    cost: Callable[[Plan], int] = toy_cost,
    cancel: dict[int, list[int]] | None = None,
    switch: dict[int, Policy] | None = None,
    shed: Collection[int] = (),
    planned: Callable[[Scheduler, Plan], None] = lambda scheduler, plan: None,
) -> Run:
    """Run until everybody has left.

    `cancel` says whom (of those in the system) to take out before which step, `switch` which policy decides from
    which step on, `shed` at which steps the newer half of the batch finds no memory, and none so large is made again.
    """
    run = Run(scheduler, sequences)
    run.most_slots = scheduler.policy.max_batch_size
    todo = sorted(sequences, key=lambda seq: seq.arrived_at)
    while todo or not scheduler.is_idle:
        while todo and todo[0].arrived_at <= run.now:
            run.added.append(todo[0])
            run.events.append((todo[0].arrived_at, +1))
            scheduler.add(todo.pop(0))
        inside = [*scheduler.waiting, *scheduler.running]
        chosen = (cancel or {}).get(scheduler.number, []) if inside else []
        gone = dict.fromkeys(inside[index % len(inside)] for index in chosen)
        run.events += [(run.now, -1)] * len(scheduler.remove_all(list(gone), run.now))
        if switch and scheduler.number in switch:
            left = scheduler.switch(switch.pop(scheduler.number), run.now)
            run.events += [(run.now, -1)] * len(left)
            run.most_slots = max(run.most_slots, scheduler.policy.max_batch_size)
            check_conservation(run)
        plan = scheduler.plan(run.now)
        if plan is None:
            sleep(run, todo)
            continue
        if plan.number in shed and len(plan.sequences) > 1:
            plan = scheduler.preempt(plan, plan.sequences[len(plan.sequences) // 2 :], run.now)
            scheduler.slot_cap = len(scheduler.running)
        assert len(scheduler.running) <= scheduler.slot_cap
        check_plan(run, plan)
        planned(scheduler, plan)
        run.now += cost(plan)
        iteration = scheduler.commit(plan, forward(plan), run.now)
        run.plans.append(plan)
        run.iterations.append(iteration)
        run.events += [(run.now, -1)] * len(iteration.left)
        check_books(run, iteration)
    check_end(run)
    return run


def sleep(run: Run, todo: list[Sequence]) -> None:
    """Let time pass to the next arrival or to when the policy wants to be asked again."""
    scheduler = run.scheduler
    wake_at = scheduler.wake_at(run.now)
    times = [seq.arrived_at for seq in todo[:1]]
    times += [wake_at] if wake_at is not None and wake_at < float("inf") else []
    if times:
        assert min(times) > run.now, "the policy is woken and lets nobody join"
        run.now = min(times)
    elif not scheduler.is_idle:
        assert not scheduler.policy.draining, "somebody waits, and nothing will ever come"
        scheduler.drain()


def check_plan(run: Run, plan: Plan) -> None:
    scheduler = run.scheduler
    members = [*plan.sequences, *plan.held, *plan.paused]
    assert len({id(seq) for seq in members}) == len(members)
    assert len({seq.slot for seq in scheduler.running}) == len(scheduler.running)
    assert {id(seq) for seq in members} == {id(seq) for seq in scheduler.running}
    assert len(scheduler.running) <= run.most_slots
    assert all(0 <= seq.slot < run.most_slots for seq in members)
    assert all(seq.arrived_at <= plan.started_at for seq in members)
    assert not any(seq.is_finished for seq in plan.sequences)
    assert len(plan.counts) == len(plan.sequences)
    assert all(0 < n <= seq.pending for seq, n in zip(plan.sequences, plan.counts))
    assert plan.sequences or scheduler.policy.overruns, "a step must compute something"


def check_conservation(run: Run) -> None:
    scheduler = run.scheduler
    finished = [seq for seq in run.added if seq.state == "finished"]
    inside = [seq for seq in scheduler.running if seq.state != "finished"]  # or answered early
    assert len(run.added) == len(scheduler.waiting) + len(inside) + len(finished)


def check_books(run: Run, iteration: Iteration) -> None:
    scheduler, pages = run.scheduler, run.scheduler.pages
    check_conservation(run)
    assert iteration.queue == len(scheduler.waiting)
    rows = iteration.batch_size
    assert abs(sum(iteration.slot_steps) - max(scheduler.policy.max_batch_size, rows)) < 1e-9
    assert min(iteration.slot_steps) >= 0
    if pages is not None:
        used = {page for seq in scheduler.running for page in seq.pages}
        assert pages.used == len(used)
        assert 0 not in used
        assert all(seq.computed <= len(seq.pages) * pages.page_size for seq in scheduler.running)


def check_end(run: Run) -> None:
    pages, slots = run.scheduler.pages, run.scheduler.policy.max_batch_size
    assert all(seq.state == "finished" and seq.finish_reason for seq in run.sequences)
    assert sorted(run.scheduler._free_slots) == list(range(slots))
    assert pages is None or pages.free == pages.total
    for seq in run.sequences:
        if seq.finish_reason == "length":
            assert seq.output_ids == list(range(seq.max_tokens))
        until = seq.finished_at if seq.scheduled_at is None else seq.scheduled_at
        waited = sum(seconds for _, seconds in seq.waited.values())
        assert seq.preemptions or abs(waited - (until - seq.arrived_at)) < 1e-6


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    """Draw up to 12 small requests in order of arrival, prompts of two words so that prefixes recur."""
    now, trace = 0, []
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12)
    for gap, prompt, output in draw(
        st.lists(st.tuples(st.integers(0, 40), prompts, st.integers(1, 8)), min_size=1, max_size=12)
    ):
        now += gap
        trace.append((now, prompt, output))
    return trace


@st.composite
def pools(draw: st.DrawFn) -> Callable[[], PagePool | None]:
    """Draw what makes a pool in which each request of `traces` fits alone, or what makes none."""
    if draw(st.booleans()):
        return lambda: None
    size = draw(st.integers(1, 5))
    least = -(-20 // size) + 1
    pages = draw(st.integers(least, 3 * least))
    return partial(PagePool, pages, size, prefix_cache=draw(st.booleans()), salt="test")
