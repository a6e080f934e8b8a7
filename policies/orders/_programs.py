"""Orders by the program of a request, with an account for each of a fixed number of programs.

A request without a program counts under its session; without either, it counts alone.
"""

from collections.abc import Hashable

from policies.orders._sorted import Sorted
from scheduling.latest import Latest
from scheduling.options import option
from scheduling.sequence import Sequence


class Programs(Sorted):
    """Smallest key first, then by arrival; the key depends on what a request's program has received."""

    w_p = option(0.2, "price of a prompt token that is computed", low=0.0, high=1e9)
    w_q = option(1.0, "price of a generated token", low=0.0, high=1e9)
    guard = option(100.0, "seconds of waiting after which the oldest request goes first", low=0.0)

    def __init__(self) -> None:
        self.claims = self.claims.but(guard=self.guard, overtaking_tokens=0, uses=("program", "session"))
        # By program, what it has received, and when a call last came or left; the least recently used first.
        self.accounts = Latest[Hashable, tuple[float, float]]()
        # Of a request inside: both when it arrived, its own too, since one that was suspended must not be charged twice.
        self._before: dict[Sequence, tuple[float, float]] = {}

    def holder(self, seq: Sequence) -> Hashable:
        """Return what the account of a request is found by; false for one that counts alone."""
        return seq.program or seq.session

    def opening(self, seq: Sequence) -> float:
        """Return the account of a program when its first call arrives."""
        return 0.0

    def credit(self, account: float, before: float, service: float) -> float:
        """Return the account of a program after a call: `before` is what it was when the call arrived."""
        return account + service

    def service(self, seq: Sequence) -> float:
        """Return what a request has received itself; what is computed again counts once."""
        prompt = min(max(seq.computed, seq.recompute_until), len(seq.prompt_ids)) - seq.cached
        return self.w_p * max(0, prompt) + self.w_q * len(seq.output_ids)

    def account(self, seq: Sequence) -> float:
        return self.accounts.get(self.holder(seq), (self.opening(seq), 0.0))[0]

    def key(self, seq: Sequence, now: float) -> float:
        """Return what the program had received when the request arrived, and the request since then."""
        before, own = self._before.get(seq, (0.0, 0.0))  # after a live switch, it never arrived
        return before + self.service(seq) - own

    def is_overdue(self, seq: Sequence, now: float) -> bool:
        return now - seq.arrived_at > self.guard

    def on_arrival(self, seq: Sequence, now: float) -> None:
        self._before[seq] = self.account(seq), self.service(seq)
        self._keep(seq, self.account(seq), now)
        super().on_arrival(seq, now)

    def on_finish(self, seq: Sequence, now: float) -> None:
        super().on_finish(seq, now)
        before, own = self._before.pop(seq, (0.0, 0.0))
        self._keep(seq, self.credit(self.account(seq), before, self.service(seq) - own), now)

    def _keep(self, seq: Sequence, account: float, now: float) -> None:
        if name := self.holder(seq):
            self.accounts[name] = account, now
