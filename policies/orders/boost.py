"""Boost (Yu and Scully 2024, arXiv 2404.08826): first come, first served, but short requests count as having come earlier.

The request with the least arrival - b(s) goes first, where s is its size and the boost b(s) = ln(1 / (1 - e^(-g s))) / g. With
a large g this is the order of arrival, with a small one that of `sjf`, and in between the tail is shorter than that of both: the
best g for the far tail of a single server solves g = r (E e^(g S) - 1) for arrivals at rate r, which is estimated from the
latest requests. At a load of 1 or more there is none, and the shortest goes first, as in `sjf`. A predicted size counts by the
real sizes of requests that were predicted alike: b = ln(m / (m - 1)) / g with their mean m of e^(g S), as in UniBoost (arXiv
2606.18431, from an excerpt).

Sizes are seconds of the machine's work, which is not latency: of the time in which it was busy, each request had a share by its
tokens. Ours: the price of a prompt token, and a cap on sizes, since one huge answer would make m useless. Left out: sizes that are
not predicted at all, which need preemption by attained service.
"""

from collections import deque
from math import exp, inf, log, log1p

from policies.orders._predictions import Predicting
from policies.orders._sorted import Sorted
from scheduling.options import option
from scheduling.sequence import Sequence

LATEST, EVERY = 256, 32  # requests from which rate and sizes are estimated, and between two estimates
ALIKE = 64  # real sizes that are kept of requests that were predicted alike
CAP = 20.0  # times the mean size
FADE = 0.95  # of the time and work behind the pace, at each estimate


class Order(Predicting, Sorted):
    gamma = option(0.0, "1/s, from shortest first (small) to order of arrival (large); 0: estimated", low=0.0, high=1e6)
    w_p = option(0.2, "price of a prompt token, where one of the answer is 1", low=0.0, high=1e6)
    guard = option(100.0, "seconds of waiting after which the oldest request goes first", low=0.0)

    def __init__(self) -> None:
        self.claims = self.claims.but(guard=self.guard, overtaking_tokens=0)
        self.rate = self.gamma or inf  # the g of the order
        self._arrivals: deque[float] = deque(maxlen=LATEST)
        self._works: deque[float] = deque(maxlen=LATEST)  # of answered requests, in tokens
        self._alike: dict[int, deque[float]] = {}  # the same, by the predicted one
        self._inside: set[Sequence] = set()
        self._began = self._busy = self._worked = 0.0  # since when requests run; seconds and tokens before that
        self._answered = 0

    def work(self, seq: Sequence, output: float) -> float:
        """Return the work of a request with this many tokens of answer, in tokens."""
        return max(1.0, self.w_p * len(seq.prompt_ids) + output)

    def key(self, seq: Sequence, now: float) -> float:
        work = self.work(seq, self.predict(seq))
        if not self.rate:
            return work
        pace = self._busy / self._worked if self._worked else 0.0
        return seq.arrived_at - self._boost(work, pace) if pace else seq.arrived_at

    def _boost(self, work: float, pace: float) -> float:
        known = (work,) if self.predictor == "oracle" else self._alike.get(_class_of(work), (work,))
        growth = _mean_exp([self.rate * pace * w for w in known])
        return -log1p(-1 / growth) / self.rate if growth < inf else 0.0

    def is_overdue(self, seq: Sequence, now: float) -> bool:
        return now - seq.arrived_at > self.guard

    def on_arrival(self, seq: Sequence, now: float) -> None:
        if not seq.preemptions:
            self._arrivals.append(seq.arrived_at)
        super().on_arrival(seq, now)

    def on_admit(self, seq: Sequence, now: float) -> None:
        super().on_admit(seq, now)
        if not self._inside:
            self._began = now
        self._inside.add(seq)

    def on_preempt(self, seq: Sequence, now: float) -> None:
        super().on_preempt(seq, now)
        self._leave(seq, now)

    def on_finish(self, seq: Sequence, now: float) -> None:
        work = self.work(seq, len(seq.output_ids))
        if seq.finish_reason != "abort" and seq in self._inside:
            self._works.append(work)
            alike = self._alike.setdefault(_class_of(self.work(seq, self.predict(seq))), deque(maxlen=ALIKE))
            alike.append(work)
        self._worked += work * (seq in self._inside)
        super().on_finish(seq, now)
        self._leave(seq, now)
        self._answered += 1
        if self._answered % EVERY == 0:
            self._estimate(now)

    def _leave(self, seq: Sequence, now: float) -> None:
        if seq in self._inside:
            self._inside.remove(seq)
            self._busy, self._began = self._busy + now - self._began, now

    def _estimate(self, now: float) -> None:
        """Find the best g for the latest requests, and sort the queue by it."""
        span = self._arrivals[-1] - self._arrivals[0] if self._arrivals else 0.0
        if not self.gamma and self._works and self._busy:
            pace = self._busy / self._worked
            rate = (len(self._arrivals) - 1) / span if span else inf
            self.rate = best_rate(rate, [work * pace for work in self._works])
        self._busy, self._worked = self._busy * FADE, self._worked * FADE
        for seq in [*self._entries]:
            self._drop(seq)
            self._put(seq, now)


def best_rate(arrivals: float, sizes: list[float]) -> float:
    """Return the root g > 0 of g = arrivals x (E e^(g S) - 1), 0 at a load of 1 or more."""
    mean = sum(sizes) / len(sizes)
    sizes = [min(size, CAP * mean) for size in sizes]
    if arrivals * sum(sizes) >= len(sizes):
        return 0.0
    low, high = 0.0, 1 / mean
    while arrivals * (_mean_exp([high * size for size in sizes]) - 1) < high and high * mean < 32:
        low, high = high, 2 * high
    for _ in range(24):
        middle = (low + high) / 2
        too_low = arrivals * (_mean_exp([middle * size for size in sizes]) - 1) < middle
        low, high = (middle, high) if too_low else (low, middle)
    return (low + high) / 2


def _mean_exp(exponents: list[float]) -> float:
    return sum([exp(min(x, 700.0)) for x in exponents]) / len(exponents)


def _class_of(work: float) -> int:
    return round(2 * log(work))
