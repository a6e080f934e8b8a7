"""Skip-join multi-level feedback queue (FastServe, arXiv 2305.05920), for unknown lengths.

Level i has a quantum of `quantum` x 2^i seconds. A new request joins the first level whose quantum covers its own
prompt, and sinks by one level each time it has run for its level's quantum. Requests of a lower level are preempted for
those of a higher one, and recomputed later. Every `lift_every` steps, requests that have waited for more than
`starving` seconds rise to the top. FastServe swaps preempted requests to the host; recomputing costs more, so here it
pays only in a long queue. A request that joins is not preempted until it has generated a token.
"""

from collections.abc import Collection

from policies.orders._sorted import Sorted
from scheduling.iteration import Plan
from scheduling.options import option
from scheduling.policy import Budget
from scheduling.sequence import Sequence

LEVELS = 32


class Order(Sorted):
    quantum = option(0.01, "seconds per turn at the top level", low=1e-9)
    prompt_pace = option(0.0005, "assumed seconds per prompt token", low=0.0)
    lift_every = option(1000, "steps between two checks for starving requests", low=1)
    starving = option(3.0, "seconds of waiting after which a request moves to the top level", low=0.0)

    def __init__(self) -> None:
        self._level: dict[Sequence, int] = {}
        self._used: dict[Sequence, float] = {}  # seconds at its level
        self._since: dict[Sequence, float] = {}  # when it began to wait
        self._step_count = 0

    def _level_of(self, seq: Sequence) -> int:
        level = self._level.get(seq)
        if level is None:
            level, time = 0, len(seq.prompt_ids) * self.prompt_pace
            while self.quantum * 2**level < time and level < LEVELS:
                level += 1
            self._level[seq], self._used[seq] = level, 0.0
        return level

    def key(self, seq: Sequence, now: float) -> float:
        self._since[seq] = now
        return self._level_of(seq)

    def preempt(
        self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float
    ) -> list[Sequence]:
        if budget.slots or not waiting:
            return []
        may_go = [s for s in running if s.has_progressed and not s.is_finished]
        return self._outranked(may_go, self._level_of)

    def on_step(self, plan: Plan, now: float) -> None:
        super().on_step(plan, now)
        seconds = now - plan.started_at
        for seq in plan.sequences:
            level = self._level_of(seq)
            self._used[seq] += seconds
            if self._used[seq] > self.quantum * 2**level and level < LEVELS:
                self._level[seq], self._used[seq] = level + 1, 0.0
        self._step_count += 1
        if self._step_count % self.lift_every == 0:
            self._lift(now)

    def _lift(self, now: float) -> None:
        waiting = [s for s in self._entries if self._level[s] > 0]
        for seq in [s for s in waiting if now - self._since[s] > self.starving]:
            self._drop(seq)
            self._level[seq], self._used[seq] = 0, 0.0
            self._put(seq, now)

    def on_finish(self, seq: Sequence, now: float) -> None:
        super().on_finish(seq, now)
        for kept in (self._level, self._used, self._since):
            kept.pop(seq, None)
