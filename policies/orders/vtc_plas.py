"""Fair between clients as in VTC; of each client, the program that has received the least service goes first, as in PLAS.

A client that names a new program for each call is first among its own calls only. Programs of several clients are never
the same, whatever their names. Service has the prices of `vtc`.
"""

from collections.abc import Hashable, Iterable
from math import inf

from policies.orders import plas, vtc
from policies.orders._sorted import Entry
from scheduling.sequence import Sequence


class Order(vtc.Order, plas.Order):
    count_twice = False

    def __init__(self) -> None:
        # A client that waits for its turn waits beyond the guard, which is for the order of its own requests.
        self.claims = self.claims.but(guard=inf, overtaking_tokens=inf, uses=("client", "program", "session"))
        self._lists: dict[str, list[Entry]] = {}

    def holder(self, seq: Sequence) -> Hashable:
        name = super().holder(seq)
        return name and (seq.client, name)

    def in_turn(self, client: str, now: float) -> Iterable[Sequence]:
        return self._ordered(self._queue_of(client), self._lists.get(client, []), now)

    def _list_of(self, seq: Sequence) -> list[Entry]:
        return self._lists.setdefault(seq.client, [])

    def _drop(self, seq: Sequence) -> None:
        super()._drop(seq)
        if not self._list_of(seq):
            del self._lists[seq.client]
