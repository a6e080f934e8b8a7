"""Fair completion order (Justitia, Yang et al. 2025, arXiv 2510.17015): programs one by one, as fair sharing would end them.

If all programs shared the machine evenly, each would end at some time. The one that would end first gets all that it can use, as
in weighted fair queueing: a program of cost C that arrives at the virtual time v would end at v + C, and v grows by what is
delivered, divided by the number of programs that would not have ended yet. The cost of a call is the KV that it holds, in tokens
x tokens of its answer, and is delivered when it ends. Programs that came later never take a slot back.

If costs are known and all calls of a program arrive together, it ends after no more than what is delivered until sharing would
end it and n c + (n - 1) o l, for n slots, calls that cost c, answers of o tokens and requests of l at most: for what had joined
before it arrived, and what runs beside its last call.

Ours: costs. Only a simulator knows them. A server takes that of the first call, by its limit, times the ratio of what all calls of
the programs so far have cost to what was expected of their first ones.
"""

from heapq import heappop, heappush

from policies.orders._programs import Programs
from scheduling.latest import KEPT
from scheduling.sequence import Sequence


class Order(Programs):
    w_p = w_q = 0.0  # an account is when a program would end, and nothing is charged

    def __init__(self) -> None:
        self.claims = self.claims.but(uses=(*self.claims.uses, "length"))
        self.virtual = 0.0
        self._ends: list[float] = []  # a heap: the later ends of the programs that would not have ended yet
        self._first = self._all = 0.0  # what first calls of programs were expected to cost, and all their calls did

    def opening(self, seq: Sequence) -> float:
        cost = volume(seq, seq.max_tokens)
        if self.holder(seq) and self._first:
            cost *= max(1.0, self._all / self._first)
        return self.virtual + (seq.program_volume or cost)

    def on_arrival(self, seq: Sequence, now: float) -> None:
        if (name := self.holder(seq)) not in self.accounts:
            heappush(self._ends, self.opening(seq))
            if len(self._ends) > KEPT:
                self.virtual = heappop(self._ends)
            self._first += volume(seq, seq.max_tokens) if name else 0.0
        super().on_arrival(seq, now)

    def on_finish(self, seq: Sequence, now: float) -> None:
        super().on_finish(seq, now)
        name = self.holder(seq)
        # Of a request that counts alone, what was expected: no other call will need what it left.
        delivered = volume(seq, len(seq.output_ids) if name else seq.max_tokens)
        self._all += delivered if name else 0.0
        while self._ends and delivered >= (needed := (self._ends[0] - self.virtual) * len(self._ends)):
            delivered, self.virtual = delivered - needed, heappop(self._ends)
        if self._ends:
            self.virtual += delivered / len(self._ends)
        if not self._before:  # all have left: under sharing, too
            self.virtual = max(self._ends, default=self.virtual)
            self._ends.clear()


def volume(seq: Sequence, output: int) -> float:
    """Return the KV tokens that a request holds, summed over so many tokens of its answer."""
    return len(seq.prompt_ids) * output + output * (output + 1) / 2
