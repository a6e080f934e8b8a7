"""Orders that are fair between clients: a queue for each client, and an account of the service it received."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator

from scheduling import policy
from scheduling.options import OptionError, option, shown
from scheduling.sequence import Sequence

LEAST, MOST = 1e-6, 1e6  # weights; a price divided by one is a number that a sum of prices keeps
KEPT = 1024  # accounts at least; requests that each name a new client must not fill the memory


class Fair(policy.Policy):
    """Serves the head of the queue of the client with the least `counter`; equal ones in the order first seen."""

    weights = option("", "weights of clients other than 1, such as alice:2,bob:0.5")

    def __init__(self) -> None:
        self.claims = self.claims.but(uses=("client",))
        self.counters: dict[str, float] = {}  # in the order in which clients were first seen
        self._queues: dict[str, OrderedDict[Sequence, None]] = {}
        self._weights = _parse_weights(self.weights)

    def price_of_joining(self, seq: Sequence) -> float:
        """Return what the admission of a sequence costs its client."""
        raise NotImplementedError

    def charge(self, client: str, price: float) -> None:
        """Add a price, divided by the client's weight, to its account."""
        self.counters[client] = self.counters.get(client, 0.0) + price / self.weight(client)

    def weight(self, client: str) -> float:
        """Return the weight of a client, 1 unless `weights` names it."""
        return self._weights.get(client, 1.0)

    def backlogged(self) -> list[str]:
        """Return the clients with waiting requests, in the order first seen."""
        return [client for client in self.counters if client in self._queues]

    def _queue_of(self, client: str) -> Collection[Sequence]:
        return self._queues.get(client, ())

    def in_turn(self, client: str, now: float) -> Iterable[Sequence]:
        """Return the waiting requests of a client, the first to join first."""
        return self._queue_of(client)

    def _leave(self, seq: Sequence) -> None:
        """Remove a request from its client's queue, and the queue when it is empty."""
        queue = self._queues.get(seq.client)
        if queue is not None:
            queue.pop(seq, None)
            if not queue:
                del self._queues[seq.client]

    def _forget(self) -> None:
        """Delete accounts of clients without waiting requests, the least first: those are nearest to a new client's."""
        idle = [client for client in self.counters if client not in self._queues]
        idle.sort(key=self.counters.__getitem__)
        for client in idle[: len(self.counters) - KEPT]:
            del self.counters[client]

    def order(self, waiting: Collection[Sequence], now: float) -> Iterable[Sequence]:
        """Yield the heads of the queues; a request that does not join is passed over as if it had been charged."""
        places: dict[str, Iterator[Sequence]] = {}
        passed: dict[str, float] = {}
        heads = {client: next(iter(self.in_turn(client, now))) for client in self.backlogged()}
        while heads:
            client = min(heads, key=lambda c: self.counters[c] + passed.get(c, 0.0))
            seq = heads[client]
            yield seq
            if seq.state == "waiting":
                price = self.price_of_joining(seq) / self.weight(client)
                passed[client] = passed.get(client, 0.0) + price
                places.setdefault(client, iter(list(self.in_turn(client, now))[1:]))
            if client in places:
                following = next(places[client], None)
            else:
                following = next(iter(self.in_turn(client, now)), None)
            if following is None:
                del heads[client]
            else:
                heads[client] = following

    def on_arrival(self, seq: Sequence, now: float) -> None:
        super().on_arrival(seq, now)
        self.counters.setdefault(seq.client, 0.0)
        self._queues.setdefault(seq.client, OrderedDict())[seq] = None
        if len(self.counters) > 2 * KEPT:
            self._forget()

    def on_preempt(self, seq: Sequence, now: float) -> None:
        super().on_preempt(seq, now)
        self.counters.setdefault(seq.client, 0.0)
        queue = self._queues.setdefault(seq.client, OrderedDict())
        queue[seq] = None
        queue.move_to_end(seq, last=False)

    def on_admit(self, seq: Sequence, now: float) -> None:
        super().on_admit(seq, now)
        self._leave(seq)
        if not seq.preemptions:  # its client is not charged for recomputing
            self.charge(seq.client, self.price_of_joining(seq))

    def on_cancel(self, seq: Sequence, now: float) -> None:
        super().on_cancel(seq, now)
        self._leave(seq)


def _parse_weights(text: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        client, _, weight = part.rpartition(":")
        try:
            weights[client] = float(weight)
        except ValueError:
            weights[client] = 0.0
        if not LEAST <= weights[client] <= MOST:
            raise OptionError(
                f"policy option weights has {shown(part)}, but must be client:weight with a weight from {LEAST:g} to {MOST:,.0f}. "
                "Write it as in alice:2,bob:0.5"
            )
    return weights
