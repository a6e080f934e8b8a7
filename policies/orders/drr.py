"""Deficit round robin between clients (Shreedhar and Varghese 1995), in tokens.

Each client has a deficit, from which its prompts are subtracted when they join, and its tokens when they are generated.
Clients with a deficit above 0 are served, in the order first seen. When no waiting client has any, a round begins: each
of them gets `quantum` more, times its weight. The length of an answer is unknown when it begins, so a client may
overdraw by what it has in the batch, and waits until the debt is paid. A client without waiting requests saves nothing.
"""

from collections.abc import Collection, Iterable
from math import ceil

from policies.orders._fair import Fair
from scheduling.options import option
from scheduling.sequence import Sequence


class Order(Fair):
    quantum = option(512.0, "tokens per client and round", low=1.0)

    def __init__(self) -> None:
        self.claims = self.claims.but(fair=True, fair_within=self.quantum)

    def price(self, prompt: int, output: float) -> float:
        """Return the price of a request with this many prompt and generated tokens."""
        return prompt + output

    def price_of_joining(self, seq: Sequence) -> float:
        return self.price(len(seq.prompt_ids), 0)

    def order(self, waiting: Collection[Sequence], now: float) -> Iterable[Sequence]:
        passed: dict[Sequence, None] = {}
        while True:
            clients = self.backlogged()
            if clients and not passed and all(self.counters[client] >= 0 for client in clients):
                self._begin_round(clients)
            seq = self._next(passed)
            if seq is None:
                return
            yield seq
            if seq.state == "waiting":
                passed[seq] = None

    def _begin_round(self, clients: list[str]) -> None:
        """Give each client a quantum, or as many as one of them needs to be served."""
        rounds = min(1 + ceil(self.counters[c] // self.quantum) for c in clients)
        for client in clients:
            self.counters[client] -= rounds * self.quantum

    def _next(self, passed: dict[Sequence, None]) -> Sequence | None:
        """Return a request of a client with a deficit left, or of the one with most if none has."""
        found = {client: self.head(client, passed) for client in self.backlogged()}
        heads = {client: head for client, head in found.items() if head is not None}
        if not heads:
            return None
        rich = [head for client, head in heads.items() if self.counters[client] < 0]
        return self.chosen(rich) if rich else heads[min(heads, key=self.counters.__getitem__)]

    def head(self, client: str, passed: dict[Sequence, None]) -> Sequence | None:
        """Return the first of a client's requests that are not passed over, None if there is none."""
        return next((seq for seq in self._queue_of(client) if seq not in passed), None)

    def chosen(self, heads: list[Sequence]) -> Sequence:
        """Return which of the clients' first requests goes first; all of them have a deficit left."""
        return heads[0]

    def on_admit(self, seq: Sequence, now: float) -> None:
        super().on_admit(seq, now)
        if not self._queue_of(seq.client):
            self.counters[seq.client] = max(0.0, self.counters.get(seq.client, 0.0))

    def on_token(self, seq: Sequence, now: float) -> None:
        super().on_token(seq, now)
        self.charge(seq.client, float(seq.new_tokens))
