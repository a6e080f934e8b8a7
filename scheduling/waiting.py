"""How long each request waited for which reason, in constant time per request.

At each moment one reason keeps the head of the queue waiting, and with it all requests behind. So one running total per
reason is enough: a request waited for the total when it leaves the queue minus the total when it arrived.
"""

from __future__ import annotations

from scheduling.sequence import WAIT_REASONS, Sequence

Totals = tuple[list[int], list[float]]
INDEX = {reason: i for i, reason in enumerate(WAIT_REASONS)}


class WaitClock:
    """The totals; `reason` is why the queue waits now. During a step, arrivals wait for the policy (policy_order)."""

    def __init__(self) -> None:
        self.reason = "policy_order"
        self._iterations = [0] * len(WAIT_REASONS)
        self._seconds = [0.0] * len(WAIT_REASONS)
        self._now: float | None = None
        self._number = 0
        self._arrivals: dict[Sequence, Totals] = {}

    def tick(self, now: float, number: int) -> None:
        """Count time and iterations under the current reason."""
        if self._arrivals:
            if self._now is not None:
                i = INDEX[self.reason]
                self._seconds[i] += now - self._now
                self._iterations[i] += number - self._number
        else:  # the queue is empty: the time counts for no reason
            self.reason = "policy_order"
        self._now, self._number = now, number

    def arrive(self, seq: Sequence, at: float) -> None:
        if not self._arrivals:
            self.reason = "policy_order"
        # The totals are as old as the last tick, and the reason has not changed since: what came after it is added.
        late = 0.0 if self._now is None else at - self._now
        if self._now is None:
            self._now = at
        self._arrivals[seq] = self._totals(late)

    def leave(self, seq: Sequence, now: float) -> None:
        """Add the time since `arrive` to `seq.waited`, by reason; the seconds sum to the queue time."""
        self._add(seq.waited, self._arrivals.pop(seq), now)

    def so_far(self, seq: Sequence, now: float) -> dict[str, tuple[int, float]]:
        """Return what `seq.waited` would be if it left now; any thread may call it."""
        waited = dict(seq.waited)
        if (start := self._arrivals.get(seq)) is not None:
            self._add(waited, start, now)
        elif seq.state == "waiting" and not waited:  # it has arrived since the last step was planned
            waited["policy_order"] = (0, max(0.0, now - seq.arrived_at))
        return waited

    def _add(self, waited: dict[str, tuple[int, float]], start: Totals, now: float) -> None:
        late = 0.0 if self._now is None else now - self._now
        (start_i, start_s), (end_i, end_s) = start, self._totals(late)
        if start_s == end_s and start_i == end_i:
            return
        for reason, i0, i1, s0, s1 in zip(WAIT_REASONS, start_i, end_i, start_s, end_s):
            if i1 > i0 or s1 - s0 > 1e-12:
                iterations, seconds = waited.get(reason, (0, 0.0))
                waited[reason] = (iterations + i1 - i0, seconds + s1 - s0)

    def _totals(self, late: float) -> Totals:
        seconds = self._seconds.copy()
        seconds[INDEX[self.reason]] += late
        return self._iterations.copy(), seconds
