"""Virtual token counter (Sheng et al., OSDI 2024): fair between clients, by the service that they received.

Each client has a counter. It grows by the price of a prompt when a request of the client joins, and by the price of
each token that it generates, divided by the client's weight. The head of the client with the least counter goes first.
A client that returns without waiting requests is lifted to the least counter of the waiting clients or, without any, to
that of the client whose request left the queue last, so that no client saves up service by staying away. Of two clients
that always have waiting requests, neither gets more than twice (the price of the longest prompt + that of the tokens of
a full batch) beyond the other.

Either a token has a price of its own (`cost=linear`), or a request is charged for the time that it takes alone
according to a profile (`cost=profile`, the artifact's second cost function), in which long contexts cost more.
"""

from policies.orders._fair import Fair
from scheduling.options import option
from scheduling.sequence import Sequence

# Milliseconds of a request of p prompt and n generated tokens, Llama-2-7B on an A10G, fitted by the artifact to its
# profile: a p + b n + c p n + d n^2 + e (`cost_func_profile` in slora/server/router/req_queue.py).
PROFILE = (0.21001891, 0.10075395, 0.0039868, 0.00324733, 1.14601454)


class Order(Fair):
    w_p = option(1.0, "linear: price of a prompt token", low=0.0, high=1e9)
    w_q = option(2.0, "linear: price of a generated token", low=0.0, high=1e9)
    cost = option(
        "linear",
        "linear: w_p and w_q per token; profile: the times that the paper measured for these lengths",
        choices=("linear", "profile"),
    )
    count_twice = option(
        False, "charge as the paper's code does: only generated tokens, and all of them again when a request finishes"
    )

    lifts = True

    def __init__(self) -> None:
        self._decoded: list[Sequence] = []  # those that got a token in the step that ended at `_at`
        self._at = float("-inf")
        self._left_last = ""  # the client whose request left the queue last
        self.claims = self.claims.but(fair=not self.count_twice)

    def price(self, prompt: int, output: float) -> float:
        """Return the price of a request with this many prompt and generated tokens."""
        if self.cost == "profile":
            a, b, c, d, e = PROFILE
            return a * prompt + b * output + c * prompt * output + d * output * output + e
        return self.w_p * prompt + self.w_q * output

    def price_of_joining(self, seq: Sequence) -> float:
        return self.price(len(seq.prompt_ids), 0)

    def price_of_token(self, seq: Sequence, number: int, count: int = 1) -> float:
        """Return the price of a sequence's token by its number, from 1, or of `count` tokens up to that one."""
        prompt = len(seq.prompt_ids)
        return self.price(prompt, number) - self.price(prompt, number - count)

    def on_arrival(self, seq: Sequence, now: float) -> None:
        if self.lifts and not self._queues.get(seq.client):
            waiting = self.backlogged() or [self._left_last]
            least = min(self.counters.get(client, 0.0) for client in waiting)
            self.counters[seq.client] = max(self.counters.get(seq.client, 0.0), least)
        super().on_arrival(seq, now)

    def _leave(self, seq: Sequence) -> None:
        if seq in self._queue_of(seq.client):
            self._left_last = seq.client
        super()._leave(seq)

    def on_token(self, seq: Sequence, now: float) -> None:
        super().on_token(seq, now)
        number = len(seq.output_ids)
        if not self.count_twice:
            self.charge(seq.client, self.price_of_token(seq, number, seq.new_tokens))
        elif number > 1:  # the code charges before a decode, so that it is one token behind
            if now != self._at:
                self._decoded, self._at = [], now
            self._decoded.append(seq)
            self.charge(seq.client, self.price_of_token(seq, number - 1, seq.new_tokens))

    def on_finish(self, seq: Sequence, now: float) -> None:
        super().on_finish(seq, now)
        if self.count_twice and now == self._at:
            for decoded in self._decoded:
                self.charge(decoded.client, self.price_of_token(decoded, len(decoded.output_ids)))
            self._decoded = []
