"""When a new request will join and end: the work before it, counted in steps, and how long a step takes by its rows. Pure.

Those that wait join before it, one whenever a slot is free. Each computes its prompt in one step, which gives its first token,
and then one token in each. For a continuous loop in order of arrival, with room for the KV of all and exact lengths, this is
what happens unless more requests arrive, which only add rows; so with an exact law the request never ends earlier.

The first arrival after a step, or after a request left unserved, goes through the whole queue. The next ones go on
where that ended, in a time that grows with the slots and not with the queue.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable
from copy import copy
from functools import cache

from scheduling.batch import RunningBatch
from scheduling.iteration import Plan
from scheduling.policy import Policy
from scheduling.sequence import Estimate, Sequence
from scheduling.step_law import StepLaw

FITTED = 32  # steps after which the law counts as known
OPEN_ENDED = 64  # tokens of an answer of which the client named no length


class Backlog:
    """The law of one engine's steps, and the estimates that it allows; none before it is known.

    `batches` are those of the engines on one queue, treated as equal and as one engine with all their rows.
    """

    def __init__(self, batch: RunningBatch) -> None:
        self.law = StepLaw()
        self.batches = [batch]
        self._ended = 0.0  # when the last step ended
        # Without and with the last sequence that came. Cleared when sequences compute tokens or leave: what the queues are
        # found by may be the same again when another sequence has joined.
        self.queues: dict[tuple[object, ...], _Queue] = {}

    def learn(self, plan: Plan, now: float) -> None:
        """Note that a step was computed, from `plan.started_at` to `now`."""
        rows = sum(plan.counts) + (plan.padding + len(plan.held) if plan.padded else 0)
        if rows:  # before an upstream, a step may have nothing but an end
            self.law.learn(rows, now - plan.started_at)
        self._ended = now

    def estimate(self, seq: Sequence, waiting: OrderedDict[Sequence, None], policy: Policy) -> Estimate | None:
        """Return when a new sequence will join and end; None before the law is known."""
        if self.law.steps < FITTED:
            return None

        def prompt(one: Sequence) -> int:
            return one.pending - policy.cached_tokens(one)  # tokens that it computes when it joins

        running = [one for batch in self.batches for one in batch.running]
        engines = sum(bool(batch.slots) for batch in self.batches)
        slots = sum(batch.free_slots for batch in self.batches) + len(running)
        if not slots:  # all engines are gone for now
            return None
        # The queue that the last arrival left behind is this one's, unless someone came, joined or left meanwhile.
        state = (slots, len(running), len(waiting), next(reversed(waiting), None))
        queue = self.queues.get(state)
        if queue is None:
            queue = _Queue(slots, running, cache(lambda rows: self.law.seconds(-(-rows // engines), 0.0)))
            for one in waiting:
                queue.add(prompt(one), _steps(one))
        longer, steps = queue.copy(), _steps(seq)
        longer.add(prompt(seq), steps)
        self.queues = {state: queue, (slots, len(running), len(waiting) + 1, seq): longer}
        now = max(seq.arrived_at, self._ended)
        return Estimate(now + longer.joins_at, now + longer.end_of(steps))


class _Queue:
    """The steps from now to that in which the last of a queue joins: step `_number`, which begins at `joins_at`."""

    def __init__(self, slots: int, running: Iterable[Sequence], seconds: Callable[[int], float]) -> None:
        live = [seq for seq in running if seq.finish_reason is None]
        self._slots, self._seconds = slots, seconds
        self._ends = [_steps(seq) for seq in live]  # a heap: the steps before which those in the batch leave it
        self._rows, self._more = len(live), sum(seq.pending - 1 for seq in live)  # of its first step alone
        self._number, self.joins_at = 0, 0.0
        heapq.heapify(self._ends)

    def copy(self) -> _Queue:
        other = copy(self)
        other._ends = self._ends.copy()
        return other

    def add(self, prompt: int, steps: int) -> None:
        """Let a sequence wait behind the others, which computes `prompt` tokens when it joins."""
        if len(self._ends) < self._slots:
            heapq.heappush(self._ends, steps)
        else:
            end = self._ends[0]
            if end > self._number:
                equal = end - self._number - 1
                self.joins_at += self._seconds(self._rows + self._more) + equal * self._seconds(self._rows)
                self._number, self._more = end, 0
            heapq.heapreplace(self._ends, end + steps)
            self._rows -= 1
        self._rows += 1
        self._more += prompt - 1

    def end_of(self, steps: int) -> float:
        """Return when the last sequence ends, which has so many steps."""
        number, rows, more, now, seconds = self._number, self._rows, self._more, self.joins_at, self._seconds
        last = number + steps
        for end in sorted(self._ends):
            if end > number:
                now += seconds(rows + more) + (end - number - 1) * seconds(rows)
                number, more = end, 0
                if end == last:
                    break
            rows -= 1
        return now


def _steps(seq: Sequence) -> int:
    """Return the steps that a sequence needs from its next one on."""
    tokens = min(seq.max_tokens, OPEN_ENDED) if seq.open_ended else seq.max_tokens
    return max(1, tokens - len(seq.output_ids))
