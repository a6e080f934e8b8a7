"""The pages of the session that is expected to ask least often again; needs the field `session`.

The expected number of turns after turn k is the mean over the sessions seen so far: of all that reached turn k, how often
any later turn was reached. Requests without a session are expected never to come back. So that a session that ended early
does not stay, a page's worth counts from that of the last evicted one (GreedyDual, Young 1991): what is not used again
falls behind. A page keeps the most that it was worth, as other sessions may share it.
"""

from collections import Counter

from scheduling import eviction
from scheduling.latest import Latest
from scheduling.sequence import Sequence

MOST_TURNS = 1000  # that are told apart


class Eviction(eviction.Eviction):
    uses = "session"

    def __init__(self) -> None:
        self._reached: Counter[int] = Counter()  # by turn: the sessions that got so far
        self._floor = 0.0  # the worth of the page that was evicted last
        self._turns = Latest[str, int]()  # that each session had

    def worths(self, seq: Sequence, before: list[float]) -> list[float]:
        turn = self._turns.get(seq.session, 0) + 1
        worth = self._floor + (seq.finish_reason is None)  # a preempted request comes back for this turn, too
        if seq.session:
            if seq.finish_reason is not None:
                self._count(seq.session, min(turn, MOST_TURNS))
            worth += self.expected_turns(turn)
        return [max(known, worth) for known in before]

    def _count(self, session: str, turn: int) -> None:
        self._reached[turn] += 1
        self._turns[session] = turn

    def on_evict(self, worth: float) -> None:
        self._floor = max(self._floor, worth)

    def expected_turns(self, turn: int) -> float:
        """Return how many more turns a session has on average after this one."""
        later = sum(count for reached, count in self._reached.items() if reached > turn)
        return later / max(1, self._reached[turn])
