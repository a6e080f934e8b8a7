"""Requests, and a driver with a toy cost and faults on demand that checks the scheduler's books after every step."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable
from typing import Any

import policies
from scheduling.advance import TokenRun as Tokens
from scheduling.advance import run_of
from scheduling.backlog import FITTED
from scheduling.driver import Driver
from scheduling.iteration import Iteration, Plan
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Output, Scheduler
from scheduling.sequence import Sequence
from scheduling.step_law import StepLaw

Request = tuple[int, int | list[int], int]  # arrival, prompt (or its length), output tokens
PAGE = 16
VOCABULARY = 4000  # token ids that every model has


def requests(*trace: Request) -> list[Sequence]:
    """Return a sequence for each request; a prompt given by its length is 0, 1, 2 ..."""
    return [
        Sequence(
            list(range(prompt)) if isinstance(prompt, int) else list(prompt), output, id=f"r{i}", arrived_at=arrival
        )
        for i, (arrival, prompt, output) in enumerate(trace)
    ]


class KnownLaw(StepLaw):
    """The law of steps that take 10 and one more for each row, known from the beginning."""

    steps = FITTED

    def seconds(self, rows: int, unknown: float) -> float:
        return 10 + rows


def burst(*shapes: tuple[int, int]) -> list[Sequence]:
    return requests(*((0, prompt, output) for prompt, output in shapes))


def make_scheduler(
    policy: str, slots: int, pages: PagePool | None = None, budget: int = 1 << 30, **options: Any
) -> Scheduler:
    """Return a scheduler whose policy has these options; without a budget, a step may compute any number of tokens."""
    return Scheduler(policies.get_policy(policy, max_batch_size=slots, options=options), pages, budget)


def add_all(scheduler: Scheduler, sequences: Iterable[Sequence]) -> None:
    for seq in sequences:
        scheduler.add(seq)


def plan_of(scheduler: Scheduler, now: float) -> Plan:
    """Plan a step, which there must be."""
    plan = scheduler.plan(now)
    assert plan is not None
    return plan


def prompt_tokens(plan: Plan) -> int:
    """Return the prompt tokens that a step computes, including padding."""
    counts = [n for seq, n in zip(plan.sequences, plan.counts) if seq.is_prefilling]
    return sum(counts) + plan.padding


def toy_cost(plan: Plan) -> int:
    """Return the milliseconds of a step: 10 + prompt tokens + 2 x decoding rows, held ones too."""
    decodes = sum(1 for seq in plan.sequences if not seq.is_prefilling) + len(plan.held)
    return 10 + prompt_tokens(plan) + 2 * decodes


def next_tokens(plan: Plan) -> list[Output]:
    """Return the number of tokens so far of each sequence that is due one, and those behind it if they have drafts."""
    tokens: list[Output] = [
        len(seq.output_ids) if count >= seq.pending else None for seq, count in zip(plan.sequences, plan.counts)
    ]
    for i, drafts in enumerate(plan.drafts):
        first = len(plan.sequences[i].output_ids)
        if drafts:
            tokens[i] = Tokens(run_of(drafts, range(first, first + len(drafts) + 1)))
    return tokens


def failing(rows: dict[int, list[int]]) -> Callable[[Plan], list[Output]]:
    """Return a model whose given rows of given steps are failures."""

    def forward(plan: Plan) -> list[Output]:
        outputs = next_tokens(plan)
        for index in rows.get(plan.number, []) if outputs else ():
            outputs[index % len(outputs)] = RuntimeError("this row's own fault")
        return outputs

    return forward


class Run(Driver):
    """A run that is checked after every step; `events` are (time, change of the number in system).

    `cancel` names the sequences (of those in the system) to take out before a step, `switch` the policy that decides
    from a step on, `preempt` the steps at which the newer half of the batch finds no memory; later batches are as small.
    """

    def __init__(
        self, scheduler: Scheduler, sequences: list[Sequence], *,
        forward: Callable[[Plan], list[Output]] = next_tokens, cost: Callable[[Plan], int] = toy_cost,
        cancel: dict[int, list[int]] | None = None, switch: dict[int, Policy] | None = None,
        preempt: Collection[int] = (), planned: Callable[[Scheduler, Plan], None] = lambda scheduler, plan: None,
    ) -> None:  # fmt: skip
        super().__init__(scheduler, sequences)
        self.sequences = sequences
        self.forward, self.cost, self.planned = forward, cost, planned
        self.cancel, self.switch, self.preempt = cancel or {}, switch or {}, preempt
        self.plans: list[Plan] = []
        self.iterations: list[Iteration] = []
        self.events: list[tuple[float, int]] = []
        self.open: list[Sequence] = []  # added, and not finished when last looked at
        self.most_slots = scheduler.policy.max_batch_size  # of all policies: a switch lets those that run stay

    @property
    def held(self) -> float:
        return sum(it.slot_steps.held for it in self.iterations)

    def records(self) -> list[dict]:
        return [it.to_dict() for it in self.iterations]

    def deliver(self) -> None:
        super().deliver()
        scheduler = self.scheduler
        inside = [*scheduler.waiting, *scheduler.running]
        chosen = self.cancel.get(scheduler.number, []) if inside else []
        gone = dict.fromkeys(inside[index % len(inside)] for index in chosen)
        self._leave(len(scheduler.remove_all(list(gone), self.now)))
        if scheduler.number in self.switch:
            self._leave(len(scheduler.switch(self.switch.pop(scheduler.number), self.now)))
            self.most_slots = max(self.most_slots, scheduler.policy.max_batch_size)
            self.check_conservation()

    def add(self, seq: Sequence) -> None:
        self.open.append(seq)
        self.events.append((seq.arrived_at, +1))
        super().add(seq)

    def refuse(self, sequences: list[Sequence]) -> None:
        self.events += [(seq.finished_at or 0, -1) for seq in sequences]

    def drain(self) -> None:
        """Do nothing yet: a policy may wait for others until its deadline."""

    def _leave(self, count: int) -> None:
        self.events += [(self.now, -1)] * count

    def compute(self, plan: Plan) -> list[Output]:
        scheduler = self.scheduler
        if plan.number in self.preempt and len(plan.sequences) > 1:
            scheduler.preempt(plan, plan.sequences[len(plan.sequences) // 2 :], self.now)
            scheduler.batch.slot_cap = len(scheduler.running)
        assert len(scheduler.running) <= scheduler.batch.slot_cap
        self.check_plan(plan)
        self.planned(scheduler, plan)
        self.plans.append(plan)
        self.now += self.cost(plan)
        return self.forward(plan)

    def record(self, iteration: Iteration) -> None:
        self.iterations.append(iteration)
        self._leave(len(iteration.left))
        self.check_books(iteration)

    def sleep(self) -> None:
        until = self.next_event()
        if until < float("inf"):
            assert until > self.now, "the policy is woken and lets nobody join"
            self.now = until
        else:
            assert not self.scheduler.policy.draining, "somebody waits, and nothing will ever come"
            self.scheduler.drain()

    def check_plan(self, plan: Plan) -> None:
        running = self.scheduler.running
        members = [*plan.sequences, *plan.held, *plan.paused]
        assert len({id(seq) for seq in members}) == len(members)
        assert len({seq.slot for seq in running}) == len(running)
        assert {id(seq) for seq in members} == {id(seq) for seq in running}
        assert len(running) <= self.most_slots
        assert all(0 <= seq.slot < self.most_slots for seq in members)
        assert all(seq.arrived_at <= plan.started_at for seq in members)
        assert not any(seq.is_finished for seq in plan.sequences)
        assert len(plan.counts) == len(plan.sequences)
        drafted = [len(drafts) for drafts in plan.drafts] or [0] * len(plan.counts)
        assert all(0 < n - k <= seq.pending for seq, n, k in zip(plan.sequences, plan.counts, drafted))
        assert plan.drafts == [] or sum(plan.counts) <= self.scheduler.token_budget
        for seq, n, k in zip(plan.sequences, plan.counts, drafted):
            assert not k or (n == k + 1 and seq.pending == 1 and len(seq.output_ids) + n <= seq.max_tokens)
        assert plan.sequences or self.scheduler.policy.claims.overruns, "a step must compute something"
        if plan.repeats:
            last = self.plans[-1]
            assert (plan.number, plan.sequences, plan.held) == (last.number + 1, last.sequences, last.held)
            assert plan.counts == [seq.pending for seq in plan.sequences] == [1] * len(plan.sequences)

    def check_conservation(self) -> None:
        scheduler = self.scheduler
        self.open = [seq for seq in self.open if seq.state != "finished"]
        inside = [seq for seq in scheduler.running if seq.state != "finished"]  # or answered early
        assert len(self.open) == len(scheduler.waiting) + len(inside)

    def check_books(self, iteration: Iteration) -> None:
        scheduler, pages = self.scheduler, self.scheduler.pages
        self.check_conservation()
        assert iteration.queue == len(scheduler.waiting)
        rows = iteration.batch_size
        assert abs(sum(iteration.slot_steps) - max(scheduler.policy.slots, rows)) < 1e-9
        assert min(iteration.slot_steps) >= -1e-12
        if pages is not None:
            used = scheduler.batch.pages.pinned.union(*(seq.pages for seq in scheduler.running))
            assert pages.used == len(used)
            assert 0 not in used
            # A finished row that only holds its slot may have lost its pages.
            computing = [seq for seq in scheduler.running if seq.pages or not seq.is_finished]
            assert all(seq.computed <= len(seq.pages) * pages.page_size for seq in computing)

    def check_end(self) -> None:
        scheduler, pages = self.scheduler, self.scheduler.pages
        assert all(seq.state == "finished" and seq.finish_reason for seq in self.sequences)
        scheduler.batch.slot_cap = 1 << 60
        assert scheduler.batch.free_slots == scheduler.policy.max_batch_size
        assert pages is None or pages.used == len(scheduler.batch.pages.pinned)
        for seq in self.sequences:
            if seq.finish_reason == "length":
                assert seq.output_ids == list(range(seq.max_tokens))
            until = seq.finished_at if seq.scheduled_at is None else seq.scheduled_at
            waited = sum(seconds for _, seconds in seq.waited.values())
            assert seq.preemptions or abs(waited - (until - seq.arrived_at)) < 1e-6


def drive(scheduler: Scheduler, sequences: list[Sequence], **options: Any) -> Run:
    """Run until all sequences have left."""
    run = Run(scheduler, sequences, **options)
    run.run()
    run.check_end()
    return run


def order_of_admission(run: Run) -> list[str]:
    return [id for it in run.iterations for id in it.joined]


def drawn(count: int, prefixes: int, tokens: int, tail: int = 20, answer: int = 24, seed: int = 1) -> list[Sequence]:
    """Return shuffled requests with `prefixes` beginnings of `tokens` tokens, then 4 to `tail`, answered by 4 to `answer`."""
    rng = random.Random(seed)
    heads = [[rng.randrange(VOCABULARY) for _ in range(tokens)] for _ in range(prefixes)]
    chosen = [heads[i % prefixes] for i in range(count)]
    rng.shuffle(chosen)
    return [
        Sequence(
            [*head, *(rng.randrange(VOCABULARY) for _ in range(rng.randint(4, tail)))], rng.randint(4, answer), id=f"r{i}"
        )
        for i, head in enumerate(chosen)
    ]  # fmt: skip


def least(sequences: list[Sequence], page_size: int = PAGE) -> int:
    """Return the fewest prompt tokens to compute: each distinct page of the trie once, and what is behind the last."""
    pool = PagePool(2, page_size)
    chains = [pool.hashes(seq.prompt_ids) for seq in sequences]
    tails = sum(len(seq.prompt_ids) - page_size * len(chain) for seq, chain in zip(sequences, chains))
    return page_size * len({block for chain in chains for block in chain}) + tails
