"""When a new request will join and end: the work before it, counted in steps, and how long a step takes by its rows. Pure.

Those that wait join before it, one whenever a slot is free. Each computes its prompt in one step, which gives its first token,
and then one token in each. For a continuous loop in order of arrival, with room for the KV of all and exact lengths, this is
what happens unless more requests arrive, which only add rows; so with an exact law the request never ends earlier.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable

from scheduling.iteration import Plan
from scheduling.sequence import Estimate, Sequence
from scheduling.step_law import StepLaw

FITTED = 32  # steps after which the law counts as known
OPEN_ENDED = 64  # tokens of an answer of which the client named no length


class Backlog:
    """The law of one engine's steps, and the estimates that it allows; none before it is known."""

    def __init__(self) -> None:
        self.law = StepLaw()
        self._ended = 0.0  # when the last step ended

    def learn(self, plan: Plan, now: float) -> None:
        """Note that a step was computed, from `plan.started_at` to `now`."""
        rows = sum(plan.counts) + (plan.padding + len(plan.held) if plan.padded else 0)
        self.law.learn(rows, now - plan.started_at)
        self._ended = now

    def estimate(
        self,
        seq: Sequence,
        waiting: Iterable[Sequence],
        running: Iterable[Sequence],
        slots: int,
        prompt: Callable[[Sequence], int],
    ) -> Estimate | None:
        """Return when a new sequence joins and ends; `prompt` returns the tokens that a sequence computes when it joins."""
        if self.law.steps < FITTED:
            return None
        work = [(0, one.pending, _steps(one)) for one in running if one.finish_reason is None]
        ends = [steps for _, _, steps in work]
        heapq.heapify(ends)
        for one in (*waiting, seq):
            start = 0 if len(ends) < slots else heapq.heappop(ends)
            work.append((start, prompt(one), _steps(one)))
            heapq.heappush(ends, start + work[-1][2])
        begins, _, steps = work[-1]
        return Estimate(*self._times(work, max(seq.arrived_at, self._ended), begins, begins + steps))

    def _times(self, work: Iterable[tuple[int, int, int]], now: float, begins: int, ends: int) -> tuple[float, float]:
        """Return when two steps begin; `work` has the first step of each sequence, its rows in it, and its steps."""
        changes: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for start, first, steps in work:
            rows, more = changes[start]
            changes[start] = rows + 1, more + first - 1
            rows, more = changes[start + steps]
            changes[start + steps] = rows - 1, more
        joins_at, rows, more, before = now, 0, 0, 0
        for step in sorted(changes):
            if step > before:
                now += self.law.seconds(rows + more, 0.0) + (step - before - 1) * self.law.seconds(rows, 0.0)
            if step == begins:
                joins_at = now
            if step == ends:
                break
            change, more = changes[step]
            rows, before = rows + change, step
        return joins_at, now


def _steps(seq: Sequence) -> int:
    """Return the steps that a sequence needs from its next one on."""
    tokens = min(seq.max_tokens, OPEN_ENDED) if seq.open_ended else seq.max_tokens
    return max(1, tokens - len(seq.output_ids))
