"""Deficit round robin between clients (Shreedhar and Varghese 1995), in tokens.

Each client has a deficit, from which its prompts are subtracted when they join, and its tokens when they are generated.
Clients with a deficit above 0 are served, in the order first seen. When no waiting client has any, a round begins: each
of them gets `quantum` more, times its weight. The length of an answer is unknown when it begins, so a client may
overdraw by one request, and waits until the debt is paid. A client without waiting requests saves nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import ceil

from policies.orders._fair import Fair
from scheduling.options import option
from scheduling.sequence import Sequence


class Order(Fair):
    quantum = option(512.0, "tokens per client and round", low=1.0)

    def price_of_joining(self, seq: Sequence) -> float:
        return float(len(seq.prompt_ids))

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
        """Return the head of the first client with a deficit left, or of the one with most if none has."""
        queues = self._queues
        heads = {c: next((s for s in queues[c] if s not in passed), None) for c in self.backlogged()}
        able = [client for client, head in heads.items() if head is not None]
        if not able:
            return None
        rich = [c for c in able if self.counters[c] < 0]
        return heads[rich[0] if rich else min(able, key=self.counters.__getitem__)]

    def on_admit(self, seq: Sequence, now: float) -> None:
        super().on_admit(seq, now)
        if not self._queue_of(seq.client):
            self.counters[seq.client] = max(0.0, self.counters.get(seq.client, 0.0))

    def on_token(self, seq: Sequence, now: float) -> None:
        super().on_token(seq, now)
        self.charge(seq.client, float(seq.new_tokens))
