"""Lengths of answers, predicted from what a server knows of a request, and learned from the answers that finish.

The logarithm of a length is a sum of effects: of the prompt's length, of the limit, of the client, and of each token near
the prompt's end. They are learned one answer at a time by a Kalman filter with a diagonal covariance (Crammer, Kulesza and
Dredze, NIPS 2009): the variance of an effect sets its step and shrinks what was seen rarely, so that no rate has to be
chosen. An answer that its limit cut says only that it would have been at least as long.

A wrong order is worse than none. So each answer is first compared with the latest others: while an order by prediction
would not save waiting, all predictions are equal, and orders by length fall back to arrival. Where it would cost waiting,
what was learned has become wrong, and is forgotten. Predictions then count after a probation, which is longer each time
that they become harmful again soon. So requests whose lengths change their meaning over and over cost little.
"""

from collections import deque
from math import exp, log
from zlib import crc32

from scheduling.sequence import Sequence

TAIL = 64  # tokens at the prompt's end that are read; those of a chat template are the same for all
BUCKETS = 4096  # of the effects of tokens and clients; two in one bucket are confused
PRIOR = 64.0  # tokens, before any answer
COMPARED = 8  # latest answers that a new one is compared with
MEMORY = 16.0  # answers over which the worth of the order is averaged
TRUSTED, HARMFUL = 0.25, 0.0  # worth above which predictions count, and below which they are forgotten
PROBATION = 32  # answers before predictions count again
DOUBT = 4  # how many times longer it is if they soon were harmful again
BIAS, PROMPT, LIMIT = -1, -2, -3  # effects; those of clients and tokens are numbered from 0
VARIANCES = {BIAS: 4.0, PROMPT: 0.25, LIMIT: 0.25}  # of effects before any answer, in squared logarithms
OF_TOKEN = 0.05  # the same of a token or a client
NOISE = 1.0  # variance of what no effect explains


class Lengths:
    """Predicts lengths in tokens; `learn` is called with each complete answer."""

    def __init__(self) -> None:
        self._typical = log(PRIOR)  # mean of the logarithms of the latest lengths
        self._probation = 0
        self._forget()

    def _forget(self) -> None:
        self._answers, self._counted = 0, False  # since then; whether predictions counted
        self._effects = {BIAS: (self._typical, VARIANCES[BIAS])}  # mean and variance
        self._latest: deque[tuple[float, int]] = deque(maxlen=COMPARED)  # predicted and real length
        # Tokens of waiting that the order saved, and that the best one would have: a few to begin with.
        self._saved, self._most = 0.0, COMPARED * exp(self._typical)

    @property
    def worth(self) -> float:
        """The part of the wait saved by the best order that an order by prediction saves; as by chance 0, at least -1."""
        return self._saved / self._most

    def predict(self, seq: Sequence) -> float:
        """Return the predicted length of an answer, or the same for all while predictions are not worth it."""
        return self._length(seq, _features(seq)) if self._counts else exp(self._typical)

    @property
    def _counts(self) -> bool:
        return self.worth > TRUSTED and self._answers >= self._probation

    def learn(self, seq: Sequence) -> None:
        """Compare a complete answer with its prediction, then correct the effects."""
        features, length = _features(seq), len(seq.output_ids)
        self._compare(self._length(seq, features), length)
        self._answers += 1
        self._counted |= self._counts
        if self._counted and self.worth < HARMFUL:
            soon = self._answers < 2 * DOUBT * self._probation
            self._probation = DOUBT * self._probation if soon else PROBATION
            self._forget()
        real = log(max(1, length))
        self._typical += (real - self._typical) / MEMORY
        known = [(i, x, *self._effect(i)) for i, x in features]
        error = real - sum([x * effect for _, x, effect, _ in known])
        if error > 0 or length < seq.max_tokens:
            total = NOISE + sum([x * x * variance for _, x, _, variance in known])
            for i, x, effect, variance in known:
                gain = x * variance / total
                self._effects[i] = effect + gain * error, variance * (1 - gain * x)

    def _effect(self, i: int) -> tuple[float, float]:
        return self._effects.get(i) or (0.0, VARIANCES.get(i, OF_TOKEN))

    def _length(self, seq: Sequence, features: list[tuple[int, float]]) -> float:
        logarithm = sum([x * self._effect(i)[0] for i, x in features])
        return min(exp(min(logarithm, 30.0)), float(seq.max_tokens))

    def _compare(self, predicted: float, length: int) -> None:
        self._saved *= 1 - 1 / MEMORY
        self._most *= 1 - 1 / MEMORY
        for other, real in self._latest:
            self._saved += (length - real) * ((predicted > other) - (predicted < other))
            self._most += abs(length - real)
        self._latest.append((predicted, length))


def _features(seq: Sequence) -> list[tuple[int, float]]:
    """Return the effects of a request, each with the number that it is multiplied by."""
    limit = 0.0 if seq.open_ended else log(max(1, seq.max_tokens) / PRIOR)
    hashed = {token * 2654435761 % 4294967291 % BUCKETS for token in seq.prompt_ids[-TAIL:]}
    hashed.add(crc32(seq.client.encode()) % BUCKETS)
    return [
        (BIAS, 1.0),
        (PROMPT, log(max(1, len(seq.prompt_ids)) / PRIOR)),
        (LIMIT, limit),
        *((i, 1.0) for i in hashed),
    ]
