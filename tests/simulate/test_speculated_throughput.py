"""As many drafts as are worth their time: never slower than none, and faster where rows cost little, on a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from scheduling.driver import Driver, tokens_due
from scheduling.iteration import Plan
from scheduling.policy import Policy
from scheduling.scheduler import Output, Scheduler
from scheduling.sequence import UNKNOWN_TOKEN, Sequence
from scheduling.speculation import MOST, Offer, Speculator
from tests.support import points

LAWS: dict[str, Callable[[int], float]] = {
    "weights are read, then rows are computed": lambda rows: max(10, 6 + 0.6 * rows),
    "each row costs": lambda rows: 6 + 3 * rows,
    "rows are free": lambda rows: 20 + 0.1 * rows,
    "rows in groups of eight": lambda rows: 10 * (1 + (rows - 1) // 8),
}
WORST = 0.97


class Lucky:
    """Proposes each token right with the chance of its sequence, and offers drafts in a share of the steps."""

    spent = 0.0

    def __init__(self, chances: tuple[float, ...], share: float) -> None:
        self._chances, self._share = chances, share
        self._rng = random.Random(3)

    def survey(self, sequences: list[Sequence]) -> list[Offer]:
        return [
            Offer(i, MOST) for i, seq in enumerate(sequences) if seq.output_ids and self._rng.random() < self._share
        ]

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        return [
            [
                UNKNOWN_TOKEN if self._rng.random() < self._chances[int(seq.id) % len(self._chances)] else 0
                for _ in range(k)
            ]
            for seq, k in zip(sequences, counts)
        ]

    def seconds(self, sequences: int) -> float:
        return 0.0

    def forget(self, seq: Sequence) -> None:
        pass


class Machine(Driver):
    """Takes the time of a law, a few percent more or less, and now and then three times as long."""

    def __init__(self, scheduler: Scheduler, sequences: list[Sequence], law: Callable[[int], float]) -> None:
        super().__init__(scheduler, sequences)
        self.law, self.rng, self.sequences = law, random.Random(5), sequences

    def compute(self, plan: Plan) -> list[Output]:
        slower = 1 + abs(self.rng.gauss(0, 0.05)) if self.rng.random() < 0.99 else 3
        self.now += self.law(sum(plan.counts)) * slower + (0.1 if plan.drafts else 0)
        return tokens_due(plan)

    def tokens_per_second(self) -> float:
        """Return the rate until most of the answers are complete, while the batch is full."""
        total = sum(seq.max_tokens for seq in self.sequences)
        while self.turn():
            done = sum(len(seq.output_ids) for seq in self.sequences)
            if done > 0.8 * total:
                break
        return done / self.now


def rate(law: Callable[[int], float], slots: int, speculator: Speculator | None) -> float:
    rng = random.Random(9)
    sequences = [Sequence([1] * 20, rng.randrange(60, 260), id=str(i)) for i in range(5 * slots)]
    return Machine(Scheduler(Policy(slots), None, 600, speculator=speculator), sequences, law).tokens_per_second()


@pytest.mark.parametrize("slots", points(2, 1, 8, 2, 4, 16, 32, 64))
@pytest.mark.parametrize("law", LAWS)
def test_drafts_are_never_slower_than_none(law: str, slots: int) -> None:
    plain = rate(LAWS[law], slots, None)
    for chances, share in (((0.9,), 1.0), ((0.05,), 1.0), ((0.05, 0.9), 0.5), ((0.4,), 0.2)):
        assert rate(LAWS[law], slots, Speculator(Lucky(chances, share))) > WORST * plain


def test_drafts_are_faster_where_rows_cost_little_and_most_of_them_are_right() -> None:
    for law, slots, least in (("rows are free", 1, 4.0), ("rows are free", 8, 3.0), (next(iter(LAWS)), 1, 3.5)):
        lucky = rate(LAWS[law], slots, Speculator(Lucky((0.9,), 1.0)))
        assert lucky > least * rate(LAWS[law], slots, None)
