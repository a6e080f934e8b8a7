"""Goals by class (Niyama or QoServe, Goel et al. 2025, arXiv 2503.22562): deadlines first, and under load short requests.

A request of a priority in `interactive` has goals for each token: `ttft` seconds for the first and `itl` more for each that follows.
Any other has one for its whole answer: its deadline, or `slo` seconds. The least of goal + alpha x load x work goes first, where work is the seconds that
a request needs to its goal, and load the number of waiting requests per slot: so earliest deadline first becomes shortest first as
a queue forms. Those that cannot meet their goals any more are relegated: they go last, the shortest first. Prompts get the time
that the stream with the least slack leaves in a step (`time-budget`); an answer with one goal has an equal part for each token.

Ours: the values of the options, and the measure of load. Left out: that running prompts are paused for more urgent ones, and that
an application names the requests that are relegated first.
"""

from collections.abc import Collection, Iterable
from math import inf

from policies import time_budget
from policies._step_time import FITTED
from policies.orders._predictions import Predicting
from scheduling.options import option
from scheduling.sequence import Sequence


class Policy(time_budget.Policy, Predicting):
    interactive = option((1,), "priorities with goals for the first token and the gaps; others: for the whole answer")
    ttft = option(2.0, "interactive: seconds to the first token", low=0.0)
    slo = option(10.0, "deadline in seconds for other requests that set none", low=0.0)
    alpha = option(1.0, "weight of a request's work for each waiting request per slot; 0: earliest goal first", low=0.0)
    guard = option(100.0, "seconds of waiting after which the oldest request goes first", low=0.0)

    def __init__(self) -> None:
        uses = dict.fromkeys(("priority", "deadline", *self.claims.uses))
        self.claims = self.claims.without_order().but(guard=self.guard, overtaking_tokens=0, uses=tuple(uses))

    def order(self, waiting: Collection[Sequence], now: float) -> Iterable[Sequence]:
        load = self.alpha * len(waiting) / self.slots
        return sorted(super().order(waiting, now), key=lambda seq: self._urgency(seq, now, load))

    def _urgency(self, seq: Sequence, now: float, load: float) -> tuple[int, float]:
        if now - seq.arrived_at > self.guard:
            return 0, seq.arrived_at
        goal, work = self._goal(seq), 0.0
        if self.law.steps > FITTED:
            answer = 0.0 if seq.priority in self.interactive else self.alone * self._rest(seq)
            work = self.law.seconds(seq.pending, 0, 0) + answer
        return (1, goal + load * work) if now + work <= goal else (2, work)

    def _goal(self, seq: Sequence) -> float:
        """Return when the next token of an interactive request is due, or the whole answer of another."""
        if seq.priority in self.interactive:
            return max(seq.arrived_at + self.ttft, seq.first_token_at or 0.0) + self.itl * len(seq.output_ids)
        return seq.arrived_at + self.slo if seq.deadline is None else seq.deadline

    def _rest(self, seq: Sequence) -> float:
        return max(1.0, self.predict(seq) - len(seq.output_ids))

    def time_left(self, seq: Sequence, now: float) -> float:
        left = self._goal(seq) - now
        if seq.priority in self.interactive:
            return left
        return left / self._rest(seq) if left > 0 else inf  # what is late anyway holds up no prompts
