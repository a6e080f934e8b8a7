"""What the simulator's tests share: schedulers and sequences from numbers, estimates with their errors, commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import policies
from costs import published
from costs.cost import Cost
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.__main__ import main
from simulate.simulator import Run, simulate

COST_A = published.make("oracle-a")


def make_scheduler(policy: str, slots: int, budget: int = 1 << 30, **options: Any) -> Scheduler:
    """Return a scheduler without pages whose policy has these options."""
    return Scheduler(policies.get_policy(policy, max_batch_size=slots, options=options), None, budget)


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
    """Run a command; return the object on stdout's last line, and the words on stderr."""
    assert main(list(argv)) == code
    captured = capsys.readouterr()
    return json.loads(captured.out.splitlines()[-1]) if captured.out else None, captured.err
