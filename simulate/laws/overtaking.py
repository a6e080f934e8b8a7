"""The law of bounded overtaking: how much work that arrived later may join before a request that waits."""

from __future__ import annotations

from math import inf

from scheduling.claims import Claims
from scheduling.iteration import Plan
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.laws.laws import Broken, names

LAW = "bounded overtaking"


class Overtaking:
    """The work that has passed each waiting request, in tokens of prompts and of answers as long as was asked for.

    A claim of a guard, or of a window of arrivals, excepts what passes before the one, or arrives within the other.
    """

    def __init__(self, claims: Claims) -> None:
        self._most = claims.overtaking_tokens
        self._guard = claims.guard if claims.guard < inf else -inf
        self._window = claims.overtakes if claims.overtakes < inf else 0.0
        self.passed: dict[Sequence, int] = {}  # tokens, by the waiting request that they passed

    def check(self, scheduler: Scheduler, plan: Plan) -> None:
        """Raise Broken if more work passes a request than the policy claims."""
        if not plan.joined:
            return
        for seq in plan.joined:
            self.passed.pop(seq, None)
        fresh = [seq for seq in plan.joined if not seq.preemptions]  # what passes is counted once
        last = max((seq.arrived_at for seq in fresh), default=-inf)
        for seq in scheduler.waiting:  # in order of arrival, after the preempted
            if last - seq.arrived_at > self._window:
                if plan.started_at - seq.arrived_at > self._guard:
                    self._pass(
                        seq, [other for other in fresh if other.arrived_at - seq.arrived_at > self._window], plan
                    )
            elif not seq.preemptions:
                return

    def _pass(self, seq: Sequence, passing: list[Sequence], plan: Plan) -> None:
        tokens = self.passed[seq] = self.passed.get(seq, 0) + sum(other.total for other in passing)
        if tokens > self._most:
            raise Broken(
                LAW,
                f"{seq.id} has waited for {plan.started_at - seq.arrived_at:g} when it is passed by {names(passing)}, "
                f"which arrived later: now by {tokens:,} tokens, and the policy claims at most {self._most:,g}",
            )
