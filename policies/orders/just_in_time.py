"""Just in time: of the requests that can still meet their deadlines, the one that must start soonest goes first.

(JITServe, arXiv 2504.20068.) A request must start at its deadline less the time that its answer takes: its predicted tokens, each
with the seconds that a share of `quantile` of the latest answers stayed within, so that worse predictions mean a larger margin.
Requests that have missed that start go last, the shortest first: served now, they would only make others late. As long as nothing
is known of the time of answers, this is `edf`.

Left out: goals for the first token and for the gaps, since a request carries one deadline, and preemption, with which the paper
takes back service that a request does not need yet.
"""

from collections import deque
from collections.abc import Collection, Iterable

from policies.orders._predictions import Predicting
from scheduling.options import option
from scheduling.sequence import Sequence

LATEST, EVERY = 256, 16  # answers whose times are kept, and between two estimates


class Order(Predicting):
    slo = option(10.0, "deadline in seconds for requests that set none", low=0.0)
    quantile = option(0.9, "share of answers that take no longer than expected", low=0.0, high=1.0)
    guard = option(100.0, "seconds of waiting after which the oldest request goes first", low=0.0)

    def __init__(self) -> None:
        uses = dict.fromkeys(("deadline", *self.claims.uses))
        self.claims = self.claims.but(guard=self.guard, overtaking_tokens=0, uses=tuple(uses))
        self.pace = 0.0  # seconds for each predicted token
        self._paces: deque[float] = deque(maxlen=LATEST)
        self._ended = 0

    def order(self, waiting: Collection[Sequence], now: float) -> Iterable[Sequence]:
        return sorted(waiting, key=lambda seq: self._rank(seq, now))

    def _rank(self, seq: Sequence, now: float) -> tuple[int, float]:
        if now - seq.arrived_at > self.guard:
            return 0, seq.arrived_at
        need = self.pace * max(0.0, self.predict(seq) - len(seq.output_ids))
        start = (seq.arrived_at + self.slo if seq.deadline is None else seq.deadline) - need
        return (1, start) if now <= start else (2, need)

    def on_finish(self, seq: Sequence, now: float) -> None:
        if seq.finish_reason != "abort" and seq.scheduled_at is not None and not seq.preemptions:
            self._paces.append((now - seq.scheduled_at) / max(1.0, self.predict(seq)))
            self._ended += 1
            if self._ended % EVERY == 0:
                known = sorted(self._paces)
                self.pace = known[min(int(self.quantile * len(known)), len(known) - 1)]
        super().on_finish(seq, now)
