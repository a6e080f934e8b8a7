"""Calibration: from timings of single steps to a cost model, its error and its file.

The engine is timed in a process of its own (`python -m dev.benchmarks.probe`), because this package imports no torch. The fit
is non-negative least squares on rows divided by the measured time, so that relative errors count. Its error is measured
on points that are left out of it.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from costs.cost import Affine, Cost, Host, to_dict
from costs.steps import Step, seen_in
from simulate.measured.least_squares import PLAIN, law_of, solve, terms_of
from terminal.progress import counted

ROOT = Path(__file__).parents[2]
KNEES = (64, 128, 256, 512)
CHOSEN = (1 / 32, 1 / 16, 1 / 8, 1 / 4)  # of the experts, by one token
BUCKETS = (  # of graphs: of this server on a GPU, of vLLM, and powers of two
    (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512),
    (1, 2, 4, *range(8, 513, 8)),
    tuple(2**i for i in range(10)),
)
BETWEEN = (3, 5, 9, 17, 25, 33, 49, 65, 97)  # batches, as on a GPU, of which graphs may compute more rows
EARNED = 0.9  # of the error is left with a switch of the law that is worth it
LIKELIER = 12.0  # the test statistic of a likelihood ratio, for a dozen switches of which none should come from noise
MARGIN = 24  # tokens below the context, of the longest sequences to time
FOLDS = 5
ACCEPT_MAPE, ACCEPT_WORST = 0.08, 0.20  # on a shared CPU; 0.05 on a GPU
DRIFT = 0.05


@dataclass(frozen=True)
class Point:
    """A step to time: rows that decode at one context length, beside prompts in chunks after cached tokens."""

    decodes: int = 0
    context: int = 0
    prefills: int = 0
    chunk: int = 0
    cached: int = 0
    masks: int = 0  # of the decoding rows, those whose token is sampled under the mask of a grammar

    @property
    def step(self) -> Step:
        """Return the sums that cost models charge for."""
        pairs = self.prefills * self.chunk * (self.cached + (self.chunk + 1) / 2)
        return Step(
            decodes=self.decodes,
            context=self.decodes * (self.context + 1),
            prefills=self.prefills,
            prompt=self.prefills * self.chunk,
            pairs=pairs,
            masks=self.masks,
        )


Measure = Callable[[Sequence[Point]], Iterable[float]]


@dataclass(frozen=True)
class Fit:
    """A law, its relative errors on points held out by cross-validation, and the sizes that were `seen_in` them."""

    cost: Affine
    errors: np.ndarray
    drift: float = 0.0
    seen: dict[str, int] = field(default_factory=dict)

    @property
    def mape(self) -> float:
        return float(np.abs(self.errors).mean())

    @property
    def worst(self) -> float:
        return float(np.abs(self.errors).max())


def grid(size: str = "small", most: int = 256, context: int = 1024) -> list[Point]:
    """Return the points to time; `small` for a CPU, `full` for a GPU; no step has more than `most` prompt tokens.

    No sequence is longer than `context`. Points beyond the usual contexts have at most as many tokens in all as the largest usual one.
    """
    small = size == "small"
    batches = (1, 2, 4, 8, 16, 32) if small else (1, 2, 4, 8, 16, 32, 64, 128)
    contexts = (16, 128, 512) if small else (16, 128, 512, 960)
    longest = context - MARGIN
    prompts = (8, 32, 128, 256) if small else (8, 32, 128, 512, 1000)
    chunks = (32, 128) if small else (32, 128, 512)
    points = [Point(b, c) for b in batches for c in contexts]
    points += [Point(prefills=n, chunk=p) for p in prompts for n in (1, 4) if n * p <= most or n == 1]
    points += [Point(prefills=1, chunk=c, cached=512) for c in chunks]
    points += [Point(d, 128, 1, c) for d in (4, 16) for c in chunks]
    points += [Point(b, 128) for b in BETWEEN if not small]
    points += [Point(b, 16, masks=b) for b in (4, 16, 32)]
    if longest > contexts[-1] + MARGIN and longest > 2 * 512:
        points += [Point(b, longest) for b in batches if b == 1 or b * longest <= batches[-1] * contexts[-1]]
        points += [Point(prefills=1, chunk=c, cached=longest - c) for c in chunks]
    return [p for p in points if p.chunk <= most and max(p.context, p.cached + p.chunk) <= longest]


def fit(steps: Sequence[Step], seconds: np.ndarray, law: Affine = PLAIN) -> Affine:
    """Fit the constants of the default law by relative errors; knee, chosen and buckets are those of `law`."""
    return law_of(solve(np.array([terms_of(step, law) for step in steps]), seconds, seconds), law)


def predict(cost: Cost, steps: Iterable[Step]) -> np.ndarray:
    return np.array([cost.seconds(step) for step in steps])


def cross_validate(steps: Sequence[Step], seconds: np.ndarray, law: Affine = PLAIN, folds: int = FOLDS) -> np.ndarray:
    """Return the relative error of each point as predicted by a fit without its fold; `folds` = 0 leaves one out."""
    terms, fold = np.array([terms_of(step, law) for step in steps]), np.random.default_rng(0).permutation(len(steps))
    errors = np.zeros(len(steps))
    for k in range(folds or len(steps)):
        out = fold % (folds or len(steps)) == k
        errors[out] = terms[out] @ solve(terms[~out], seconds[~out], seconds[~out]) / seconds[out] - 1
    return errors


def choose(steps: Sequence[Step], seconds: np.ndarray, drift: float = 0.0, shares: Sequence[float] = CHOSEN) -> Fit:
    """Return the law with the knee, share of experts and buckets of the least error in cross-validation.

    Each of them must earn its place by 10 % of the error, and by more than chance. `shares` are those to try.
    """
    most, seen = max(step.tokens for step in steps), seen_in(steps)

    def tried(law: Affine) -> Fit:
        return Fit(fit(steps, seconds, law), cross_validate(steps, seconds, law), drift, seen)

    def left(law: Affine) -> float:
        """Return the sum of the squared relative errors, a little more for data that a law meets exactly."""
        return float(((predict(law, steps) / seconds - 1) ** 2).sum()) + 1e-12

    best = tried(PLAIN)
    while True:
        others = [replace(best.cost, knee=knee) for knee in KNEES if 8 <= knee < most]
        others += [replace(best.cost, chosen=chosen) for chosen in shares]
        others += [replace(best.cost, buckets=buckets) for buckets in BUCKETS]
        other = min(map(tried, others), key=lambda fit: fit.mape)
        likelier = len(steps) * math.log(left(best.cost) / left(other.cost))
        if other.mape >= EARNED * best.mape or likelier < LIKELIER:
            return best
        best = other


def calibrate(
    measure: Measure, points: Sequence[Point], facts: Mapping[str, Any] | None = None
) -> tuple[Fit, list[dict[str, Any]]]:
    """Time each point twice, in random order at different times, and fit; return the fit and the timings.

    `measure` may put the share of experts that a token needs into `facts`, as "chosen"; then no other is tried.
    `drift` is the median difference between the two times; above 5 % other programs used the machine.
    """
    rng = np.random.default_rng(0)
    order = np.concatenate([rng.permutation(len(points)) for _ in range(2)])
    times = np.array(list(measure([points[i] for i in order])))
    both = np.zeros((2, len(points)))
    for turn, half in enumerate(np.split(np.arange(len(order)), 2)):
        both[turn, order[half]] = times[half]
    drift = float(np.median(np.abs(both[0] - both[1]) / both.mean(axis=0)))
    seconds = both.mean(axis=0)
    steps = [point.step for point in points]
    known = (facts or {}).get("chosen")
    fit = choose(steps, seconds, drift, [known] if known else CHOSEN)
    columns = {
        "seconds": seconds, "first": both[0], "second": both[1], "predicted": predict(fit.cost, steps),
        "held_out": seconds * (1 + fit.errors),
    }  # fmt: skip
    rows = [{**asdict(p), **{name: float(column[i]) for name, column in columns.items()}} for i, p in enumerate(points)]
    return fit, rows


def probe(arguments: Sequence[str], facts: dict[str, Any]) -> Measure:
    """Return a function that times the real engine in a process of its own, which also fills `facts`."""

    def measure(points: Sequence[Point]) -> Iterator[float]:
        command = [sys.executable, "-m", "dev.benchmarks.probe", *arguments]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps([asdict(point) for point in points]) + "\n")
            process.stdin.close()
            for line in process.stdout:
                message = json.loads(line)
                if "error" in message:
                    raise ValueError(message["error"])
                if "seconds" in message:
                    yield message["seconds"]
                else:
                    facts.update(message)
        if process.returncode:
            raise RuntimeError(
                f"the engine's process exited with {process.returncode}; its output is above. Use --model and "
                "--load-format as for ./server.sh"
            )

    return measure


def shown(measure: Measure, console: Console) -> Measure:
    """Return the same function, which also shows how many steps are timed."""

    def watched(points: Sequence[Point]) -> Iterator[float]:
        steps = iter(measure(points))
        first = [*itertools.islice(steps, 1)]  # an engine that cannot start ends without progress
        with counted(console, len(points), "steps timed") as progress:
            for number, seconds in enumerate(itertools.chain(first, steps), 1):
                progress(number)
                yield seconds

    return watched


def write(path: Path, fit: Fit, rows: Sequence[dict[str, Any]], host: Host, facts: dict[str, Any]) -> None:
    """Write the file that `--cost FILE.json` and `--model mock:FILE.json` read."""
    content = {
        "cost": to_dict(fit.cost),
        "host": asdict(host),
        "mape": fit.mape,
        "worst": fit.worst,
        "drift": fit.drift,
        "seen": fit.seen,
        "machine": facts,
        "points": list(rows),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
