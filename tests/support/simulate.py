"""What the simulator's tests share: sequences from numbers, estimates with their errors, commands, replays."""

from __future__ import annotations

import collections.abc as abc
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from costs import published
from costs.cost import Cost
from scheduling.driver import Driver, tokens_due
from scheduling.iteration import Iteration, Plan
from scheduling.scheduler import Output, Scheduler
from scheduling.sequence import Sequence
from simulate.__main__ import main
from simulate.simulator import Run, simulate
from tests.support.scheduling import make_scheduler

COST_A = published.make("oracle-a")


def sequences(rows: Iterable[tuple[float, int, int]]) -> list[Sequence]:
    """Return a sequence for each (arrival, prompt tokens, output tokens)."""
    return [Sequence([0] * prompt, output, id=f"r{i}", arrived_at=at) for i, (at, prompt, output) in enumerate(rows)]


def poisson(rate: float, lengths: np.ndarray, rng: np.random.Generator, prompt: int = 1) -> list[Sequence]:
    """Return Poisson arrivals with these output lengths."""
    times = np.cumsum(rng.exponential(1 / rate, len(lengths))).tolist()
    return sequences((at, prompt, n) for at, n in zip(times, lengths.tolist()))


def replicate(one: Callable[[np.random.Generator], float], seeds: int) -> tuple[float, float]:
    """Return the mean over independent runs and its standard error."""
    values = [one(np.random.default_rng([seed, 7])) for seed in range(seeds)]
    return float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(seeds))


def agrees(found: tuple[float, float], exact: float) -> bool:
    """Say whether an estimate lies within 4 of its errors or 1 % of the exact value (notes, section 14)."""
    mean, error = found
    return abs(mean - exact) <= max(4 * error, 0.01 * exact)


def run_poisson(
    policy: str, slots: int, cost: Cost, rate: float, lengths: np.ndarray, rng: np.random.Generator, **options: Any
) -> Run:
    return simulate(make_scheduler(policy, slots, **options), poisson(rate, lengths, rng), cost)


def uniform(n: int, rng: np.random.Generator) -> np.ndarray:
    """Draw L ~ U{1..128} decode steps after a prefill that yields no token: L + 1 tokens of ours."""
    return rng.integers(1, 129, n) + 1


def run_command(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[Any, str]:
    """Run a command; return the object on stdout's last line, or its only run, and the words on stderr."""
    assert main(list(argv)) == code
    captured = capsys.readouterr()
    told = json.loads(captured.out.splitlines()[-1]) if captured.out else None
    runs = told["runs"] if argv[0] in ("run", "fleet") and told else []
    return runs[0] if len(runs) == 1 else told, captured.err


@dataclass(frozen=True)
class Agreement:
    """How many steps had the same members, and the first that had not, in words."""

    steps: int
    same: int
    first_difference: str = ""

    @property
    def share(self) -> float:
        return self.same / self.steps if self.steps else 1.0


class Replay(Driver):
    """Plans each recorded step at the time at which it began, and commits it at the time at which it ended.

    It must not know where the records come from: a server or a simulation.
    """

    def __init__(self, scheduler: Scheduler, arrivals: Iterable[Sequence]) -> None:
        super().__init__(scheduler, arrivals)
        self.ends = 0.0
        self.iteration: Iteration | None = None

    def drain(self) -> None:
        """Do nothing: the server could not know that no request would follow."""

    def compute(self, plan: Plan) -> list[Output]:
        self.now = self.ends
        return tokens_due(plan)

    def record(self, iteration: Iteration) -> None:
        self.iteration = iteration

    def repeat(self, record: Iteration) -> Iteration | None:
        """Return the step that the scheduler runs when this one was recorded, None if it runs none."""
        self.now, self.ends, self.iteration = record.t, record.t + record.seconds, None
        self.turn()
        return self.iteration


def replay(scheduler: Scheduler, arrivals: Iterable[Sequence], records: abc.Sequence[Iteration]) -> Agreement:
    """Plan each recorded step again; compare which requests joined, and how many tokens each computed in which phase.

    `arrived_at` and the records are on one clock. The replay stops where the scheduler has nothing to do.
    """
    driver = Replay(scheduler, arrivals)
    same, difference = 0, ""
    for record in records:
        found = driver.repeat(record)
        if found is None:
            return Agreement(len(records), same, difference or f"step {record.n}: no request runs")
        ours, theirs = _decisions(found), _decisions(record)
        if ours == theirs:
            same += 1
        elif not difference:
            difference = f"step {record.n} at {record.t:g}: recorded {theirs}, replayed {ours}"
    return Agreement(len(records), same, difference)


def _decisions(record: Iteration) -> tuple[list[str], list[tuple[str, str, int]]]:
    return sorted(record.joined), sorted((m.id, m.phase, m.tokens) for m in record.members)
