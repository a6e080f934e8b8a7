"""Why who waited how long, kept in constant time per request.

At each moment one reason holds the head of the queue back, and with it everybody behind. So one running total for
each reason is enough: a request's share is the total when it leaves the queue less the total when it came.
"""

from __future__ import annotations

from scheduling.sequence import WAIT_REASONS, Sequence

Totals = tuple[list[int], list[float]]
PLACES = {reason: place for place, reason in enumerate(WAIT_REASONS)}


class WaitClock:
    """`reason` is what holds the queue back now; who arrives during an iteration waits for the policy's turn."""

    def __init__(self) -> None:
        self.reason = "policy_order"
        self._iterations = [0] * len(WAIT_REASONS)
        self._seconds = [0.0] * len(WAIT_REASONS)
        self._now: float | None = None
        self._number = 0
        self._arrivals: dict[Sequence, Totals] = {}

    def tick(self, now: float, number: int) -> None:
        """Let time and iterations pass under the present reason."""
        if self._arrivals:
            if self._now is not None:
                place = PLACES[self.reason]
                self._seconds[place] += now - self._now
                self._iterations[place] += number - self._number
        else:  # nobody's waiting: time passes under no reason
            self.reason = "policy_order"
        self._now, self._number = now, number

    def arrive(self, seq: Sequence, at: float) -> None:
        if not self._arrivals:
            self.reason = "policy_order"
        late = 0.0 if self._now is None else at - self._now
        if self._now is None:
            self._now = at
        self._arrivals[seq] = self._totals(late)

    def leave(self, seq: Sequence, now: float) -> None:
        """Add the time since `arrive` to `seq.waited`, by reason; the seconds sum to the queue time."""
        self._add(seq.waited, self._arrivals.pop(seq), now)

    def so_far(self, seq: Sequence, now: float) -> dict[str, tuple[int, float]]:
        """Return what `seq.waited` would be if it left now; any thread may ask."""
        waited = dict(seq.waited)
        if (came := self._arrivals.get(seq)) is not None:
            self._add(waited, came, now)
        elif seq.state == "waiting" and not waited:  # it has come since the policy's last turn
            waited["policy_order"] = (0, max(0.0, now - seq.arrived_at))
        return waited

    def _add(self, waited: dict[str, tuple[int, float]], came: Totals, now: float) -> None:
        late = 0.0 if self._now is None else now - self._now
        (came_i, came_s), (gone_i, gone_s) = came, self._totals(late)
        for reason, i0, i1, s0, s1 in zip(WAIT_REASONS, came_i, gone_i, came_s, gone_s):
            if i1 > i0 or s1 - s0 > 1e-12:
                iterations, seconds = waited.get(reason, (0, 0.0))
                waited[reason] = (iterations + i1 - i0, seconds + s1 - s0)

    def _totals(self, late: float) -> Totals:
        seconds = self._seconds.copy()
        seconds[PLACES[self.reason]] += late
        return self._iterations.copy(), seconds
