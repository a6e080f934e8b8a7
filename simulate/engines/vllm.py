"""The scheduler of vLLM V1: chunked prompts beside decodes, pages as they are needed, the last to join is preempted first.

With `overlap` (asynchronous scheduling, the default since 0.14) a step is planned while the one before it runs: a request
that arrived, or a slot or page that became free, in the meantime is not known to its plan. The tokens of a step are those
of the engine. Source: vllm/v1/core/sched/scheduler.py, `Scheduler.schedule`, and async_scheduler.py, version 0.19.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import takewhile

from scheduling import policy
from scheduling.options import option
from scheduling.pages import in_whole_pages
from scheduling.policy import Budget
from scheduling.sequence import Sequence


class Policy(policy.Policy):
    overlap = option(True, "plan a step while the one before it runs")

    def __init__(self) -> None:
        if not self.order_name:
            self.claims = self.claims.but(overtaking_tokens=0)
        self._planned_at = self._known_until = self._preempted_at = -1.0  # a step is planned when the last one begins
        self._left_at, self._slots_left, self._tokens_left = -1.0, 0, 0  # what the last step set free, and when
        self._prompts: list[Sequence] = []  # those that may not be computed yet

    def reserve_tokens(self, seq: Sequence) -> int:
        return seq.length

    def order(self, waiting: Collection[Sequence], now: float) -> Iterable[Sequence]:
        until, ordered = self._known_until, super().order(waiting, now)
        if not self.order_name:  # those that are preempted come first, then those that arrived first
            return takewhile(lambda seq: seq.arrived_at <= until or seq.preemptions, ordered)
        return (seq for seq in ordered if seq.arrived_at <= until or seq.preemptions)

    def admit(self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float) -> int:
        self._known_until = self._planned_at if self.overlap and running else now
        self._planned_at = now
        self._prompts = [seq for seq in self._prompts if seq.pending > 1 and seq.state == "running"]
        unknown = self.overlap and self._left_at == now and bool(running)
        self.blocks_until_change = not unknown
        if self._preempted_at == now:  # vLLM lets no request join in a step that preempts
            return 0
        return max(0, min(len(waiting), budget.slots - (self._slots_left if unknown else 0)))

    def blocked_by(self, seq: Sequence, running: list[Sequence], budget: Budget) -> str | None:
        if not self.blocks_until_change and not budget.fits(seq.length + self._tokens_left):
            return "kv_full"
        used = len(running) + sum(other.pending - 1 for other in self._prompts)
        return "token_budget" if used >= budget.tokens else None

    def on_admit(self, seq: Sequence, now: float) -> None:
        super().on_admit(seq, now)
        self._prompts.append(seq)

    def on_preempt(self, seq: Sequence, now: float) -> None:
        super().on_preempt(seq, now)
        self._preempted_at = now

    def on_finish(self, seq: Sequence, now: float) -> None:
        super().on_finish(seq, now)
        if self._left_at != now:
            self._left_at, self._slots_left, self._tokens_left = now, 0, 0
        self._slots_left += 1
        self._tokens_left += in_whole_pages(seq.length, self.page_size)
