"""What arrives: times and lengths by name, drawn from one seed, or read from a trace.

Arrivals are open loop: drawn whole before the run, gaps never cut and never rescaled. What orders go by beside length
(client, priority, deadline) can be drawn for either. It must not know policies, costs, or what becomes of a request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from client.workloads import traces
from client.workloads.corpus import CHARACTERS_PER_TOKEN
from scheduling.sequence import Sequence

Lengths = tuple[np.ndarray, np.ndarray]  # prompt tokens, output tokens
CONTEXT = 1024


@dataclass(frozen=True)
class Rows:
    """The columns of a workload: arrival in seconds, prompt tokens, output tokens, and notes about them.

    Where requests have them: client, priority (the lower first), and seconds from arrival to deadline.
    """

    at: np.ndarray
    prompt: np.ndarray
    output: np.ndarray
    client: list[str] | None = None
    notes: tuple[str, ...] = ()
    priority: list[int] | None = None
    slo: list[float] | None = None

    def sequences(self) -> list[Sequence]:
        """Return a fresh sequence for each row; prompts are zeros, equal ones share a list."""
        prompts = {int(p): [0] * int(p) for p in np.unique(self.prompt)}
        rows = zip(
            self.at.tolist(),
            self.prompt.tolist(),
            self.output.tolist(),
            self.client or repeat(""),
            self.priority or repeat(0),
            self.slo or repeat(None),
        )
        return [
            Sequence(
                prompts[p], o, id=str(i), arrived_at=at, client=client, priority=priority,
                deadline=None if slo is None else at + slo,
            )
            for i, (at, p, o, client, priority, slo) in enumerate(rows)
        ]  # fmt: skip

    @property
    def rate(self) -> float:
        """Requests a second between the first and the last; infinite when all come at once."""
        span = float(self.at[-1] - self.at[0])
        return (len(self.at) - 1) / span if span else math.inf

    @property
    def differ_in(self) -> set[str]:
        """What an order can tell these requests apart by, as `Policy.heeds` names it."""
        hints = {"client": self.client, "priority": self.priority, "deadline": self.slo}
        return {"length"} | {name for name, values in hints.items() if len(set(values or ())) > 1}

    def faster(self, factor: float) -> Rows:
        """Return the same requests at `factor` times the rate."""
        return replace(self, at=self.at / factor)

    def only(self, chosen: np.ndarray, note: str = "") -> Rows:
        """Return the requests at these places."""

        def pick(column: list[Any] | None) -> list[Any] | None:
            return column and [column[i] for i in chosen]

        notes = (*self.notes, note) if note else self.notes
        return Rows(
            self.at[chosen], self.prompt[chosen], self.output[chosen],
            pick(self.client), notes, pick(self.priority), pick(self.slo),
        )  # fmt: skip

    def fitting(self, context: int) -> Rows:
        """Return the requests that fit a context, with a note about those that do not; ValueError if none fits."""
        fits = self.prompt + self.output <= context
        if not fits.any():
            shortest = int((self.prompt + self.output).min())
            raise ValueError(
                f"--context is {context:,}, but the shortest request has {shortest:,} tokens. "
                f"Use --context {shortest} or more"
            )
        left_out = int((~fits).sum())
        note = f"skipped {left_out:,} of {len(fits):,} requests that are longer than --context {context:,}"
        return self.only(np.flatnonzero(fits), note if left_out else "")

    def hinted(self, seed: int, clients: int = 0, priorities: int = 0, slo: Many[float] = ()) -> Rows:
        """Return the requests with a client, a priority or a deadline each, drawn from one seed.

        Of `clients` the k-th sends 1/k as often as the first. Priorities are even among 1 .. `priorities`, seconds to
        the deadline among those in `slo`.
        """
        n = len(self.at)
        rngs = [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(5)[2:]]
        rows = self
        if clients:
            share = 1 / np.arange(1, clients + 1)
            drawn = rngs[0].choice(clients, n, p=share / share.sum())
            rows = replace(rows, client=[f"client-{k + 1}" for k in drawn])
        if priorities:
            rows = replace(rows, priority=rngs[1].integers(1, priorities + 1, n).tolist())
        if slo:
            rows = replace(rows, slo=rngs[2].choice(slo, n).tolist())
        return rows


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
        raise ValueError(f"the rate is {rate:g} per second, but must be above 0. Use --rate 2")
    if count < 1:
        raise ValueError(f"the number of requests is {count}, but must be at least 1. Use --num 100")
    first, second = np.random.SeedSequence(seed).spawn(2)
    prompt, output = lengths(count, np.random.default_rng(first))
    return Rows(times(rate, count, np.random.default_rng(second)), prompt, output)


def _known(name: str, table: Iterable[str], what: str) -> str:
    if name not in table:
        near = get_close_matches(name, list(table), 1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown {what} {name!r}.{guess} Use one of: {', '.join(table)}")
    return name


def read(path: Path) -> Rows:
    """Read a trace in any form that the client can send; the first request arrives at 0."""
    trace = traces.read(path)
    notes = trace.notes()
    texts = sum(1 for row in trace.rows if row.prompt)
    if texts:
        notes.append(
            f"{texts:,} prompts of the trace are text, counted as one token per {CHARACTERS_PER_TOKEN:g} characters"
        )
    prompts = [
        max(1, round(len(row.prompt) / CHARACTERS_PER_TOKEN)) if row.prompt else row.prompt_tokens for row in trace.rows
    ]
    clients = [row.user for row in trace.rows]
    return Rows(
        np.array([row.at for row in trace.rows]),
        np.array(prompts),
        np.array([row.num_tokens for row in trace.rows]),
        clients if any(clients) else None,
        tuple(notes),
    )
