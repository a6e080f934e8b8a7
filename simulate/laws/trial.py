"""One case on its way through a real scheduler, which is held against the laws before and after each step.

`try_case` raises `Broken` with the law and what happened, in plain words, at the first step that breaks one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

from scheduling.advance import run_of
from scheduling.backlog import FITTED
from scheduling.driver import Driver
from scheduling.hook_limit import HookTimeout
from scheduling.iteration import Iteration, Plan
from scheduling.located import failure
from scheduling.policy import Policy
from scheduling.scheduler import Output, PolicyError, Scheduler, TokenRun
from scheduling.sequence import Sequence
from scheduling.speculation import Speculator
from scheduling.step_law import StepLaw
from simulate.laws import laws
from simulate.laws.case import Case
from simulate.laws.contents import Contents
from simulate.laws.fairness import Service
from simulate.laws.laws import Broken, names
from simulate.laws.overtaking import Overtaking
from simulate.laws.scripted_drafter import ScriptedDrafter

MakeScheduler = Callable[..., Scheduler]
REPLAYS = 3  # of the requests that a case refuses, to see when they would have ended


def toy_cost(plan: Plan) -> int:
    """Return 10 + prompt tokens + 2 x decoding rows, padded and held ones too."""
    prompt = sum(n for s, n in zip(plan.sequences, plan.counts) if s.is_prefilling)
    decodes = sum(plan.counts) - prompt + len(plan.held)
    return 10 + prompt + plan.padding + 2 * decodes


class LeastLaw(StepLaw):
    """Less than any step takes, so that whoever cannot be on time by it cannot be on time at all."""

    steps = FITTED

    def seconds(self, rows: int, unknown: float) -> float:
        return 11.0


def first_token(seq: Sequence) -> int:
    """Return the number from which the tokens of a sequence count up, whatever else is in the batch."""
    return sum(seq.prompt_ids) * 31 + len(seq.prompt_ids) * 7


class Trial(Driver):
    """One case with one scheduler."""

    def __init__(self, case: Case, scheduler: Scheduler, sequences: list[Sequence]) -> None:
        super().__init__(scheduler, sequences)
        self.case = case
        self.sequences = sequences
        self.policy: Policy = scheduler.policy
        self.records: list[Iteration] = []
        self.policy.margin = case.margin
        self._books = laws.Books()
        self._preemptions = laws.Preemptions()
        self._contents = Contents(case.pages[1]) if case.pages is not None else None
        self._service = Service(self.policy) if self.policy.claims.fair else None
        claims = self.policy.claims
        self._overtaking = Overtaking(claims) if claims.overtaking_tokens < inf else None
        self._cancels = dict(case.cancels)
        # Of steps: much more than the requests take one by one.
        self._limit = 2000 + 2 * sum(-(-len(r.prompt) // scheduler.token_budget) + r.output for r in case.requests)
        self._first_tokens = {seq: first_token(seq) for seq in sequences}
        self._oldest: Sequence | None = None
        self._unanswered: list[Sequence] = []
        if case.drafts is not None:
            number, every = case.drafts
            scheduler.speculator = Speculator(ScriptedDrafter(self._token, every), number or None)
        scheduler.backlog.law = LeastLaw()
        self._watch_admit()

    def _watch_admit(self) -> None:
        """Report a policy that admits more than there are slots, which the scheduler would only cut."""
        admit = self.policy.admit

        def watched(waiting: Any, running: Any, budget: Any, now: float) -> int:
            n = admit(waiting, running, budget, now)
            if n > budget.slots:
                raise Broken(
                    "slots", f"admit() returned {n}, but only {budget.slots} of {self.case.slots} slots are free"
                )
            return n

        self.policy.admit = watched  # type: ignore[method-assign]

    def run(self) -> None:
        """Serve all requests; raise Broken when a law is broken."""
        super().run()
        self.check_outcomes(self.sequences)
        laws.check_all_free(self.scheduler)
        self._books.check_littles_law(self.sequences)
        if self._service is not None:
            self._service.check(self.case)

    def check_outcomes(self, sequences: list[Sequence]) -> None:
        """Hold the answers of sequences that left against the laws."""
        for seq in sequences:
            outcomes = self._books.outcomes[seq.id]
            if outcomes != 1:
                raise Broken("one outcome each", f"{seq.id} has {outcomes}")
            if seq.finish_reason != "length":
                continue
            tokens = [self._token(seq, place) for place in range(seq.max_tokens)]
            if seq.output_ids != tokens:
                raise Broken("exactly its tokens", f"{seq.id} has {seq.output_ids}, not {tokens}")

    def deliver(self) -> None:
        super().deliver()
        self._cancel()
        if self.policy.claims.guard < inf:
            self._oldest = min(self.scheduler.waiting, key=lambda seq: seq.arrived_at, default=None)

    def add(self, seq: Sequence) -> None:
        accepted = self.scheduler.add(seq)
        self._books.arrive(seq, accepted)
        if not accepted:
            laws.check_refusal(self.scheduler, seq)

    def refuse(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            self._books.leave([seq], seq.finished_at or 0)
            laws.check_refusal(self.scheduler, seq)

    def drain(self) -> None:
        if self.case.drains or self.policy.claims.patience == inf:
            self.scheduler.drain()

    def _cancel(self) -> None:
        """Cancel the request that the case names for this step."""
        index = self._cancels.pop(self.scheduler.number, None)
        inside = [*self.scheduler.waiting, *laws.unanswered(self.scheduler)] if index is not None else []
        if index is None or not inside:
            return
        seq = inside[index % len(inside)]
        self._books.leave(self.scheduler.remove_all([seq], self.now), self.now)
        if seq in self.scheduler.waiting or seq in self.scheduler.running:
            raise Broken("cancelled requests leave", f"{seq.id} was cancelled but is still in the system")

    def sleep(self) -> None:
        if self.scheduler.waiting:
            laws.check_idle(self.scheduler, self.now, self.next_event())
        super().sleep()

    def check_plan(self, plan: Plan) -> None:
        """Check the plan of a step before it is computed."""
        laws.check_guard(self.scheduler, plan, self._oldest)
        laws.check_overtaking(self.scheduler, plan)
        laws.check_blocks(self.scheduler, plan)
        laws.check_plan(self.scheduler, plan)
        laws.check_conservation_of_work(self.scheduler, plan)

    def compute(self, plan: Plan) -> list[Output]:
        self.check_plan(plan)
        self._preemptions.check(plan)
        if self._overtaking is not None:
            self._overtaking.check(self.scheduler, plan)
        if self._contents is not None:
            laws.check_contents(self._contents, plan)
        outputs: list[Output] = [
            self._token(seq, len(seq.output_ids)) if count >= seq.pending else None
            for seq, count in zip(plan.sequences, plan.counts)
        ]
        for i, drafts in enumerate(plan.drafts):
            if drafts:
                outputs[i] = self._run(plan.sequences[i], drafts)
        if self._service is not None:
            self._service.add(self.scheduler, plan, outputs)
        self._preemptions.generate(
            sum(len(output.ids) if isinstance(output, TokenRun) else 1 for output in outputs if output is not None)
        )
        self._unanswered = laws.unanswered(self.scheduler)
        self.now += toy_cost(plan)
        return outputs

    def _token(self, seq: Sequence, place: int) -> int:
        return (self._first_tokens[seq] + place) % 997

    def _run(self, seq: Sequence, drafts: list[int]) -> TokenRun:
        place = len(seq.output_ids)
        return TokenRun(run_of(drafts, [self._token(seq, place + j) for j in range(len(drafts) + 1)]))

    def record(self, iteration: Iteration) -> None:
        self.records.append(iteration)
        answered = [seq for seq in self._unanswered if seq.state == "finished"]
        self._books.leave(answered, self.now)
        self.check_record(iteration, answered)
        if self.scheduler.number > self._limit:
            inside = [*self.scheduler.waiting, *self.scheduler.running]
            raise Broken("no request starves", f"unfinished after {self._limit} steps: {names(inside)}")

    def check_record(self, iteration: Iteration, answered: list[Sequence]) -> None:
        """Check the record of a step, and the requests that it answered."""
        self._books.check_conservation(self.scheduler)
        laws.check_answers(self.scheduler, iteration, answered, self.now)
        laws.check_resources(self.scheduler, iteration)


def try_case(
    make: Callable[[int], Policy], case: Case, make_scheduler: MakeScheduler = Scheduler, twice: bool = True
) -> Trial:
    """Serve a case, `twice` with fresh policies and other addresses in memory; raise Broken when a law is broken."""
    trials = [
        _trial(make, case, case.sequences(backwards), make_scheduler)
        for backwards in ((False, True) if twice else (False,))
    ]
    if twice and trials[0].records != trials[1].records:
        step = next(i for i, (x, y) in enumerate(zip(*(t.records for t in trials))) if x != y)
        raise Broken("repeatable", f"step {step + 1} differs when the case is run again")
    # A cancellation makes other requests earlier, so with one a refused request could have been on time.
    if trials[0].policy.claims.refuses_only_late and not case.cancels:
        refused = [seq for seq in trials[0].sequences if seq.finish_reason == "refused" and seq.scheduled_at is None]
        for seq in refused[:REPLAYS]:
            laws.check_is_late(_trial(make, case, case.sequences(), make_scheduler, accepted=seq.id).sequences, seq.id)
    return trials[0]


def _trial(
    make: Callable[[int], Policy],
    case: Case,
    sequences: list[Sequence],
    make_scheduler: MakeScheduler,
    accepted: str = "",
) -> Trial:
    with laws_named():
        policy = make(case.slots)
        if accepted:
            refuse = policy.refuse
            policy.refuse = lambda seq, now: seq.id != accepted and refuse(seq, now)  # type: ignore[method-assign]
    with laws_named(policy):
        trial = Trial(case, make_scheduler(policy, case.pool(), case.budget), sequences)
        trial.run()
    return trial


@contextmanager
def laws_named(policy: Policy | None = None) -> Iterator[None]:
    """Raise Broken, with the law, for whatever goes wrong inside, in the code of a policy or elsewhere."""
    try:
        yield
    except (Broken, HookTimeout, KeyboardInterrupt):
        raise
    except PolicyError as error:
        raise Broken(_law_of(str(error)), failure(error, policy)) from error
    except AssertionError as error:
        law = "pages" if "page" in str(error) else "no crash"
        raise Broken(law, f"{error}") from error
    except BaseException as error:
        raise Broken("no crash", failure(error, policy)) from error


def _law_of(words: str) -> str:
    if "() returned " in words:
        return "what a hook returns"
    if words.startswith("order"):
        return "no request twice in a step" if "running" in words else "no request runs after it finishes"
    return "one outcome each" if words.startswith("release") else "no crash"
