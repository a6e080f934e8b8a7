"""The pages of the session that is expected to ask least often again; needs the field `session`.

The expected number of turns after turn k is the mean over the sessions seen so far: of all that reached turn k, how often
any later turn was reached. Requests without a session are expected never to come back. So that a session that ended early
does not stay, a page's worth counts from that of the last evicted one (GreedyDual, Young 1991): what is not used again
falls behind. A page that several sessions share is worth what the best of them gave it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from scheduling import eviction
from scheduling.eviction import UNKNOWN
from scheduling.sequence import Sequence

KEPT = 4096  # sessions; clients that name a new one with each request must not fill the memory
MOST_TURNS = 1000  # that are told apart


class Eviction(eviction.Eviction):
    heeds = "session"

    def __init__(self) -> None:
        self._reached: Counter[int] = Counter()  # by turn: the sessions that got so far
        self._floor = 0.0  # the worth of the page that was evicted last
        self._sessions: OrderedDict[str, tuple[int, float]] = OrderedDict()  # turn, and what its pages are worth

    def worths(self, seq: Sequence, before: list[float]) -> list[float]:
        turn, last = self._sessions.pop(seq.session, (0, UNKNOWN))
        worth = self._floor
        if seq.session:
            if seq.finish_reason is not None:  # a preempted request is in the same turn again
                turn = min(turn + 1, MOST_TURNS)
                self._reached[turn] += 1
            worth += self.expected_turns(turn)
            self._sessions[seq.session] = turn, worth
            if len(self._sessions) > KEPT:
                self._sessions.popitem(last=False)
        return [worth if known in (UNKNOWN, last) else max(known, worth) for known in before]

    def on_evict(self, worth: float) -> None:
        self._floor = max(self._floor, worth)

    def expected_turns(self, turn: int) -> float:
        """Return how many more turns a session has on average after this one."""
        later = sum(count for reached, count in self._reached.items() if reached > turn)
        return later / max(1, self._reached[turn])
