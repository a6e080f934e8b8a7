"""Virtual token counter (Sheng et al., OSDI 2024): fair between clients, by the tokens they have been served.

Each client has a counter: w_p for each prompt token when a request of it joins, w_q for each token that it is given,
divided by the client's weight. The head of the client with the least counter goes first. A client that had nobody
waiting and comes back is lifted to the least counter of those who do wait, so that nobody saves up service by
staying away. Of two clients that always have somebody waiting, neither is served more than 2 max(w_p x longest prompt,
w_q x KV tokens) beyond the other.
"""

from __future__ import annotations

from policies.orders._fair import Fair
from scheduling.options import option
from scheduling.sequence import Sequence


class Order(Fair):
    w_p = option(1.0, "price of a prompt token", low=0.0)
    w_q = option(2.0, "price of a generated token", low=0.0)
    count_twice = option(
        False, "charge as the paper's code does: decodes only, all again when somebody finishes"
    )

    fair = True
    lifts = True

    def __init__(self, max_batch_size: int, **options: object) -> None:
        super().__init__(max_batch_size, **options)
        self._decoded: list[str] = []  # clients of the tokens of the present step, which ends at:
        self._at = float("-inf")
        if self.count_twice:
            self.fair = False

    def price_of_joining(self, seq: Sequence) -> float:
        return self.w_p * len(seq.prompt_ids)

    def on_arrival(self, seq: Sequence, now: float) -> None:
        if self.lifts and not self._queues.get(seq.client):
            waiting = self.backlogged()
            if waiting:
                least = min(self.counters[client] for client in waiting)
                self.counters[seq.client] = max(self.counters.get(seq.client, 0.0), least)
        super().on_arrival(seq, now)

    def on_token(self, seq: Sequence, now: float) -> None:
        super().on_token(seq, now)
        if not self.count_twice:
            self.charge(seq.client, self.w_q)
        elif len(seq.output_ids) > 1:
            if now != self._at:
                self._decoded, self._at = [], now
            self._decoded.append(seq.client)
            self.charge(seq.client, self.w_q)

    def on_finish(self, seq: Sequence, now: float) -> None:
        super().on_finish(seq, now)
        if self.count_twice and now == self._at:
            for client in self._decoded:
                self.charge(client, self.w_q)
            self._decoded = []
