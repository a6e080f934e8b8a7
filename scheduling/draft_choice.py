"""How many drafts a step computes: as many as bring the most tokens per second. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from scheduling.sequence import Sequence

LEAST_CHANCE = 0.05  # of a draft that is considered
# Drafts must promise so many times the tokens per second of none: the promise is an estimate, and a step without drafts
# keeps the layout of the one before.
WORTH = 1.1


class DraftChoice(NamedTuple):
    """What the number of drafts in a step depends on.

    sequences, most, chances: the requests with offers, the most drafts of each, and how likely each of them is right if
    those before it are. rows: those of the step without drafts, each of which gets a token. budget: the most drafts of
    all. seconds: how long a step takes, by its number of rows. round_seconds: how long the drafter takes to propose one
    more token for each sequence.
    """

    sequences: list[Sequence]
    most: list[int]
    chances: list[float]
    rows: int
    budget: int
    seconds: Callable[[int], float]
    round_seconds: float

    def best(self) -> list[int]:
        """Return the numbers of drafts with the most expected tokens per second of this step.

        The j-th draft of a sequence brings p^j tokens, so the likeliest drafts are taken first, and each is only taken
        after the one before it (Leviathan et al. 2023, arXiv 2211.17192, for one sequence).
        """
        # A gain is a product of all before it, so in this order no draft comes before the one that it follows.
        ranked = sorted(self._gains(), reverse=True)[: self.budget]
        tokens, rows, best, number = float(self.rows), self.rows, 0.0, 0
        counts = [0] * len(self.most)
        alone, rounds = tokens / self.seconds(rows), 0
        for taken, (gain, i) in enumerate(ranked, 1):
            tokens += gain
            counts[i] += 1
            rounds = max(rounds, counts[i])
            rate = tokens / (self.seconds(rows + taken) + self.round_seconds * rounds)
            if rate > best:
                best, number = rate, taken
        if best < alone * WORTH:
            number = 0
        counts = [0] * len(self.most)
        for _, i in ranked[:number]:
            counts[i] += 1
        return counts

    def _gains(self) -> list[tuple[float, int]]:
        gains = []
        for i, (most, chance) in enumerate(zip(self.most, self.chances)):
            gain = 1.0
            for _ in range(most):
                gain *= chance
                if gain < LEAST_CHANCE:
                    break
                gains.append((gain, i))
        return gains
