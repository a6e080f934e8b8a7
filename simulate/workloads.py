"""What arrives: times and lengths by name, drawn from one seed, or read from a trace.

Arrivals are open loop: drawn whole before the run, gaps never cut and never rescaled. It must not know policies,
costs, or what becomes of a request.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from scheduling.sequence import Sequence

Lengths = tuple[np.ndarray, np.ndarray]  # prompt tokens, output tokens
CONTEXT = 1024
MOST_NAMED = 5  # lines of a trace that cannot be read


@dataclass(frozen=True)
class Rows:
    """The columns of a workload: arrival in seconds, prompt tokens, output tokens, client; what is to be said of it."""

    at: np.ndarray
    prompt: np.ndarray
    output: np.ndarray
    client: list[str] | None = None
    notes: tuple[str, ...] = ()

    def sequences(self) -> list[Sequence]:
        """Return a fresh sequence for each row; prompts are zeros, equal ones share a list."""
        prompts = {int(p): [0] * int(p) for p in np.unique(self.prompt)}
        clients: Iterable[str] = repeat("") if self.client is None else self.client
        return [
            Sequence(prompts[p], o, id=str(i), arrived_at=at, client=client)
            for i, (at, p, o, client) in enumerate(
                zip(self.at.tolist(), self.prompt.tolist(), self.output.tolist(), clients)
            )
        ]

    def faster(self, factor: float) -> Rows:
        """Return the same requests at `factor` times the rate."""
        return replace(self, at=self.at / factor)


def poisson(rate: float, count: int, rng: np.random.Generator) -> np.ndarray:
    return np.cumsum(rng.exponential(1 / rate, count))


def gamma(rate: float, count: int, rng: np.random.Generator, cv: float = 2.0) -> np.ndarray:
    """Return arrivals whose gaps have that coefficient of variation."""
    shape = 1 / cv**2
    return np.cumsum(rng.gamma(shape, 1 / (rate * shape), count))


def even(rate: float, count: int, rng: np.random.Generator) -> np.ndarray:
    return np.arange(count) / rate


def burst(rate: float, count: int, rng: np.random.Generator) -> np.ndarray:
    return np.zeros(count)


def onoff(rate: float, count: int, rng: np.random.Generator, on: float = 10.0) -> np.ndarray:
    """Return a Poisson stream of twice the rate that is silent every other `on` seconds."""
    at = poisson(2 * rate, count, rng)
    return at + np.floor(at / on) * on


def ramp(rate: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return a Poisson stream whose rate grows evenly from 0 to twice the rate over count / rate seconds."""
    unit = np.cumsum(rng.exponential(1.0, count))
    return np.sqrt(unit / count) * count / rate


ARRIVALS: dict[str, Callable[..., np.ndarray]] = {
    "poisson": poisson, "gamma": gamma, "uniform": even, "burst": burst, "onoff": onoff, "ramp": ramp,
}  # fmt: skip


def uniform(n: int, rng: np.random.Generator, low: int = 1, high: int = 128) -> Lengths:
    """Draw the oracles' answers: U{1..128}, one more each for the token that prefill gives; prompts of 16."""
    return np.full(n, 16), rng.integers(low, high + 1, n) + 1


def clipped_normal(n: int, rng: np.random.Generator) -> Lengths:
    """Draw N(100.5, 33.2) conditioned on 1..200; prompts of 10 to 80 tokens."""
    output = np.rint(rng.normal(100.5, 33.2, n)).astype(int)
    while (outside := (output < 1) | (output > 200)).any():
        output[outside] = np.rint(rng.normal(100.5, 33.2, int(outside.sum())))
    return rng.integers(10, 81, n), output


def original(n: int, rng: np.random.Generator) -> Lengths:
    """Draw as the original's client does: short prompts, 1, 25 or 100 tokens."""
    return np.full(n, 4), rng.choice([1, 25, 100], n)


def original_normal(n: int, rng: np.random.Generator) -> Lengths:
    """Draw max(1, |ceil(N(100, 100))|) tokens after max(1, |ceil(N(10, 10))|) words."""
    prompt, output = (np.abs(np.ceil(rng.normal(m, m, n))).astype(int) for m in (10, 100))
    return np.maximum(1, prompt), np.clip(output, 1, CONTEXT - 64)


def orca(n: int, rng: np.random.Generator) -> Lengths:
    """Draw U{32..512} prompt and U{1..128} output tokens (Orca, OSDI 2022)."""
    return rng.integers(32, 513, n), rng.integers(1, 129, n)


def anyscale(n: int, rng: np.random.Generator, most: int = 512) -> Lengths:
    """Draw 512 prompt tokens and round(Exp(128)) output tokens, redrawn until <= most, 1 at least (Anyscale, 2023)."""
    output = np.rint(rng.exponential(128, n)).astype(int)
    while (outside := output > most).any():
        output[outside] = np.rint(rng.exponential(128, int(outside.sum())))
    return np.full(n, 512), np.maximum(1, output)


def short_long(n: int, rng: np.random.Generator) -> Lengths:
    """Draw nine short chats (32 in, 16 out) to one long (256 in, 400 out)."""
    is_long = rng.random(n) < 0.1
    return np.where(is_long, 256, 32), np.where(is_long, 400, 16)


LENGTHS: dict[str, Callable[..., Lengths]] = {
    "uniform": uniform, "clipped-normal": clipped_normal, "original": original,
    "original-normal": original_normal, "orca": orca, "anyscale": anyscale, "short-long": short_long,
}  # fmt: skip


def draw(workload: str, rate: float, count: int, seed: int = 0, arrivals: str = "poisson") -> Rows:
    """Draw a workload; lengths and arrivals have generators of their own, so another rate sends the same requests."""
    lengths = LENGTHS[_known(workload, LENGTHS, "workload")]
    times = ARRIVALS[_known(arrivals, ARRIVALS, "arrivals")]
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"the rate is {rate:g} a second, must be positive. Use --rate 2")
    if count < 1:
        raise ValueError(f"{count} requests make no run. Use --num 100")
    first, second = np.random.SeedSequence(seed).spawn(2)
    prompt, output = lengths(count, np.random.default_rng(first))
    return Rows(times(rate, count, np.random.default_rng(second)), prompt, output)


def _known(name: str, table: Iterable[str], what: str) -> str:
    if name not in table:
        near = get_close_matches(name, list(table), 1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown {what} {name!r}.{guess} Use one of: {', '.join(table)}")
    return name


def read(path: Path, context: int | None = None) -> Rows:
    """Read a trace: a CSV of Azure's columns, of VTC's, or of a run's requests.csv, or Mooncake's JSON lines.

    With `context`, requests that do not fit it are left out; so are lines that cannot be read, which `notes` name.
    """
    columns, bad = [], []
    with path.open(newline="", encoding="utf-8") as file:
        lines: Iterable[object] = file if path.suffix == ".jsonl" else csv.DictReader(file)
        for number, line in enumerate(lines, 1 if path.suffix == ".jsonl" else 2):
            try:
                columns.append(_from_json(line) if isinstance(line, str) else _row(line, path))
            except (ValueError, KeyError, TypeError) as error:
                bad.append(f"line {number}: {error}")
    if bad and not columns:
        raise ValueError(f"{str(path)!r} has no request: {bad[0]}")
    named = "; ".join(bad[:MOST_NAMED]) + ("; ..." if len(bad) > MOST_NAMED else "")
    notes = (f"{len(bad)} of {len(bad) + len(columns)} lines left out: {named}",) if bad else ()
    if context:
        columns = [c for c in columns if c[1] + c[2] <= context]
    if not columns:
        raise ValueError(
            f"{str(path)!r} holds no request that fits. Raise --context or use another"
        )
    at, prompt, output, client = zip(*columns)
    names = list(client) if any(client) else None
    return Rows(np.array(at), np.array(prompt), np.array(output), names, notes)


def _from_json(line: str) -> tuple[float, int, int, str]:
    row = json.loads(line)
    return row["timestamp_ms"] / 1e3, int(row["input_length"]), int(row["output_length"]), ""


def _row(row: Any, path: Path) -> tuple[float, int, int, str]:
    for at, prompt, output in (
        ("arrival_s", "prompt_tokens", "output_tokens"),
        ("req_time", "prompt_len", "output_len"),
    ):
        if at in row:
            return float(row[at]), int(row[prompt]), int(row[output]), row.get("client", "")
    raise ValueError(
        f"{str(path)!r} has the columns {', '.join(row)}. Use arrival_s,prompt_tokens,output_tokens"
    )
