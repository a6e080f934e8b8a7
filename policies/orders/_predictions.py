"""Predictions of how many tokens a request will generate, for policies that go by length.

Their randomness is a hash of the seed and the request's id, so that a prediction is the same in every run, whatever
else is in the queue. A policy that uses a prediction must not look at `max_tokens` beside it.
"""

from collections import deque
from hashlib import blake2b
from math import cos, exp, log, pi, sqrt
from typing import Any

from policies.orders._learning import Lengths
from scheduling import policy
from scheduling.latest import Latest
from scheduling.options import option
from scheduling.sequence import Sequence

PRIOR = 64.0  # tokens, when nothing is known yet
KEPT = 1024  # clients whose last answers are remembered


def chance(seed: int, id: str, what: str = "") -> float:
    """Return a pseudorandom number from (0, 1) that belongs to this seed and id."""
    digest = blake2b(f"{seed}:{what}:{id}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2.0**64


def gauss(seed: int, id: str) -> float:
    """Return a standard normal number of this seed and id (Box and Muller)."""
    radius = sqrt(-2.0 * log(chance(seed, id, "radius")))
    return radius * cos(2.0 * pi * chance(seed, id, "angle"))


def _true_length(seq: Sequence) -> int:
    """Return the length of an answer in a simulation; on a server, which cannot know it, the limit."""
    return seq.answer_tokens or seq.max_tokens


class Predicting(policy.Policy):
    """A policy with `predict`, whose quality is that of the `predictor`."""

    predictor = option(
        "oracle",
        "how output lengths are predicted: exactly, with a log-normal or uniform error, as a class, as the client's mean, or learned from finished answers",
        choices=("oracle", "noisy", "uniform", "classes", "mean", "learned"),
    )
    sigma = option(0.5, "noisy: standard deviation of the logarithm of the error", low=0.0, high=10.0)
    error = option(0.5, "uniform: largest error, as a fraction of the length", low=0.0, high=1.0)
    classes = option(2, "classes: number of classes of equal width, up to `longest`", low=1, high=1000)
    longest = option(128, "classes: longest answer in tokens", low=1)
    accuracy = option(1.0, "classes: fraction of requests put into the right class", low=0.0, high=1.0)
    recent = option(5, "mean: number of the client's last answers to average", low=1, high=100_000)
    seed = option(0, "random seed of the predictions")

    def __init__(self) -> None:
        self._predicted: dict[Sequence, float] = {}
        self._past = Latest[str, deque[int]](KEPT)
        self._learner = Lengths() if self.predictor == "learned" else None
        self._guess: Any = getattr(self, f"_{self.predictor}")
        self.heeded = ("length", "client") if self.predictor in ("mean", "learned") else ("length",)
        self.claims = self.claims.but(uses=tuple(dict.fromkeys((*self.heeded, *self.claims.uses))))

    def predict(self, seq: Sequence) -> float:
        """Return how many tokens this sequence will generate, as far as known; the same at every call."""
        length = self._predicted.get(seq)
        if length is None:
            length = self._predicted[seq] = self._guess(seq)
        return length

    def _oracle(self, seq: Sequence) -> float:
        return float(_true_length(seq))

    def _noisy(self, seq: Sequence) -> float:
        return _true_length(seq) * exp(self.sigma * gauss(self.seed, seq.id))

    def _uniform(self, seq: Sequence) -> float:
        """Return the length with an error drawn evenly from -`error` to +`error` of it."""
        relative_error = self.error * (2.0 * chance(self.seed, seq.id, "error") - 1.0)
        return _true_length(seq) * (1.0 + relative_error)

    def _classes(self, seq: Sequence) -> float:
        """Return the middle of the class that the sequence is put into."""
        k = min(max(_true_length(seq) - 1, 0) * self.classes // self.longest, self.classes - 1)
        if self.classes > 1 and chance(self.seed, seq.id, "right") >= self.accuracy:
            k = (k + 1 + int(chance(self.seed, seq.id, "class") * (self.classes - 1))) % self.classes
        return (k + 0.5) * self.longest / self.classes

    def _mean(self, seq: Sequence) -> float:
        """Return the mean of the client's last answers, or of all clients' while it has none."""
        past = self._past.get(seq.client) or self._past.get("")
        return sum(past) / len(past) if past else PRIOR

    def _learned(self, seq: Sequence) -> float:
        assert self._learner is not None
        return self._learner.predict(seq)

    def on_finish(self, seq: Sequence, now: float) -> None:
        super().on_finish(seq, now)
        self._predicted.pop(seq, None)
        if seq.finish_reason == "abort":
            return
        if self._learner is not None:
            self._learner.learn(seq)
        if self.predictor == "mean":
            for client in {seq.client, ""}:
                past = self._past[client] = self._past.get(client) or deque(maxlen=self.recent)
                past.append(len(seq.output_ids))
