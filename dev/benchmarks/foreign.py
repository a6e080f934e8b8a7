"""How well a server is predicted from a log of its requests: a fit to the first half of a log, compared with the second half.

    python -m dev.benchmarks.foreign --quick --json dev/benchmarks/results/foreign.json
    python -m dev.benchmarks.foreign held-out.json --fitted cost.json

Without logs, servers are made up: a roofline with a smooth maximum, experts, graphs of whole sizes, noise of 3 % in each step,
pauses of the machine, delays of the streams. That is not of the form of the fitted law. Errors are means over mean, P50, P90, P95
and P99 of each kind of time; beside them is how many of these are within their 90 % intervals, and how wide those are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from multiprocessing import Pool
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from rich.console import Console

from costs.cost import Cost, Host
from costs.steps import Step
from dev.benchmarks import report
from scheduling.iteration import Plan
from scheduling.scheduler import Output
from simulate.commands.fit import compare
from simulate.engines import known
from simulate.fitting.fit import fit
from simulate.fitting.fitted import Fitted, load
from simulate.logs.checks import checked
from simulate.logs.log import Log, Request
from simulate.logs.read import read
from simulate.simulator import Simulation

DATA = sorted((Path(__file__).parents[2] / "docs" / "data").glob("*/"))
KINDS = ("TTFT", "TPOT", "latency")


@dataclass
class Device(Cost):
    """A card with a model: bytes that each step reads, bytes/s, FLOP per token, FLOP/s, KV bytes per token, experts, host seconds."""

    weights: float = 16e9
    bandwidth: float = 0.8e12
    flop: float = 16e9
    peak: float = 1.2e14
    kv: float = 131072.0
    experts: float = 0.0  # bytes of all
    chosen: float = 0.0  # share of the experts that one token needs
    launch: float = 2e-3
    rng: np.random.Generator = field(default_factory=np.random.default_rng)

    def seconds(self, step: Step) -> float:
        tokens = step.tokens if step.prompt else -(-step.decodes // 8) * 8
        memory = (self.weights + self.experts * (1 - (1 - self.chosen) ** tokens)) / self.bandwidth
        linear = float(np.hypot(memory**2, (tokens * self.flop / self.peak) ** 2) ** 0.5)
        attention = step.context * self.kv / self.bandwidth + step.pairs * 1e6 / self.peak
        seconds = self.launch + linear + attention + 8e-6 * step.rows + (2.9e-3 if step.prompt else 0.0)
        pause = 0.2 if self.rng.random() < 2e-4 else 0.0
        return seconds * float(np.exp(self.rng.normal(0, 0.03))) + pause


DEVICES = {
    "8B, slow card": Device(),
    "8B, fast card": Device(bandwidth=2.9e12, peak=6e14, launch=3e-3),
    "32B, two cards": Device(weights=65e9, bandwidth=3e12, flop=64e9, peak=4e14, kv=262144.0),
    "3B, slow host": Device(weights=6e9, flop=6e9, bandwidth=0.9e12, launch=9e-3, kv=114688.0),
    "30B, 128 experts": Device(4e9, 1.6e12, 6e9, 1.5e14, 98304.0, 56e9, 8 / 128, 3e-3),
    "8x7B, 8 experts": Device(4e9, 3e12, 26e9, 5e14, 131072.0, 90e9, 2 / 8),
}


class Case(NamedTuple):
    """A made-up run. `load` is a part of the capacity; with `ramp`, the second half has that many times as many arrivals a second.

    `told`: the log has the settings. `streams`: it has the times of all tokens. `assumed`: another scheduler than the true one.
    """

    device: str = "8B, slow card"
    load: float = 0.8
    slots: int = 256
    kv_tokens: int = 0
    engine: str = "vllm"
    told: bool = True
    overlap: bool = True
    ramp: float = 1.0
    streams: bool = False
    requests: int = 300
    assumed: str = ""

    @property
    def title(self) -> str:
        shown = {
            name: value for name, value in self._asdict().items() if name == "load" or value != getattr(Case(), name)
        }
        return ", ".join([self.device, *(f"{name} {value}" for name, value in shown.items() if name != "device")])

    @property
    def settings(self) -> dict[str, Any]:
        found = {"slots": self.slots, "kv_tokens": self.kv_tokens}
        return {**found, "overlap": self.overlap} if self.engine in ("vllm", "sglang") else found


QUICK = [
    Case(load=0.3), Case(load=0.9), Case(load=1.3, slots=64), Case("8B, fast card", 0.6, 128, told=False),
    Case("32B, two cards", 1.2, 128, 60_000), Case("3B, slow host", 0.5, overlap=False), Case("3B, slow host", 1.2, 32, told=False),
    Case("30B, 128 experts", 0.3), Case("30B, 128 experts", 0.9, 128), Case("8x7B, 8 experts", 1.2, 64), Case(load=0.9, kv_tokens=40_000, told=False),
    Case(load=0.8, engine="sglang"), Case(load=0.9, slots=64, engine="tgi"), Case(load=1.1, slots=16, engine="llama.cpp"),
    Case(load=0.5, ramp=2.5), Case("30B, 128 experts", 0.7, streams=True), Case(load=1.2, slots=32, assumed="tgi"),
]  # fmt: skip
FULL = [*QUICK, *(Case(*case) for case in product(DEVICES, (0.3, 0.9, 1.4), (48, 256), (0, 30_000), ("vllm", "sglang"), (True, False)))]  # fmt: skip


class Server(Simulation):
    """A made-up server on requests; `tokens` are the times of each one's tokens."""

    def __init__(self, case: Case, log: Log, rng: np.random.Generator) -> None:
        self.tokens: list[list[float]] = [[] for _ in log.at]
        policy, engine, _ = known.get(case.engine).serve(case.settings, {})
        device = replace(DEVICES[case.device], rng=rng)
        super().__init__(
            engine.scheduler(policy), log.trace.sequences(), device, Host(2e-3, first_step=0.1), False, False
        )
        self.run()

    def compute_one(self, plan: Plan, seconds: float) -> list[Output]:
        outputs = super().compute_one(plan, seconds)
        for seq, output in zip(plan.sequences, outputs):
            self.tokens[int(seq.id)] += [] if output is None else [self.now]
        return outputs


def log_of(case: Case) -> Log:
    """Serve made-up requests with a made-up server, and return its log."""
    rng, count = np.random.default_rng(crc32(case.title.encode())), case.requests
    gaps = rng.exponential(1.0, count) / np.where(np.arange(count) < count // 2, 1.0, case.ramp)
    prompts = np.clip(rng.lognormal(5.3, 1.4, count), 4, 8000).astype(int).tolist()
    answers = np.clip(rng.lognormal(5.3, 0.9, count), 2, 2000).astype(int).tolist()

    def log(at: np.ndarray, times: list[list[float]]) -> Log:
        rows = [
            Request(*asked, some[0], some[-1], chunks=some if case.streams else ())
            for asked, some in zip(zip(at.tolist(), prompts, answers), times)
        ]
        return checked(rows, case.settings if case.told else {})

    burst = Server(case, log(np.zeros(count), [[1.0] * n for n in answers]), rng).tokens
    pace = 2 * float(np.median(np.concatenate(burst))) / count  # half of the tokens come while batches are full
    at = (np.cumsum(gaps) - gaps[0]) * pace / case.load
    tokens = Server(case, log(at, [[at[-1] + 1.0] * n for n in answers]), rng).tokens
    return log(at, [np.maximum.accumulate(np.array(some) + rng.gamma(2, 1e-3, len(some))).tolist() for some in tokens])


def judged(job: Case | Path, cost: Path | None = None) -> dict[str, Any]:
    """Fit the first half of a log and compare the second, or compare all of it with what was fitted to another."""
    name, log = (job.title, log_of(job)) if isinstance(job, Case) else (job.name, read(job))
    engine = job.assumed or job.engine if isinstance(job, Case) else str(log.server.get("engine", "vllm"))
    began, begin = time.process_time(), 0 if cost else len(log.at) // 2
    fitted = load(cost) if cost else fit(log.until(begin), known.get(engine))
    seconds = time.process_time() - began
    return {**compared(name, fitted, log, begin), "seconds": seconds}


def compared(name: str, fitted: Fitted, log: Log, begin: int = 0) -> dict[str, Any]:
    """Compare the requests of a log, from the one of number `begin` on, with what is predicted for them."""
    fitted = replace(fitted, log=log, scenario=replace(fitted.scenario, rows=log.trace))
    found = compare(fitted, log, np.arange(len(log.at)) >= begin)
    figures = {c.name: [c.predicted, *(c.interval or ()), c.measured] for c in found}
    result: dict[str, Any] = {
        "name": name, "engine": fitted.kind.name, "misfit": fitted.misfit, "doubts": fitted.doubts, "figures": figures,
        "cost": asdict(fitted.law), "host": asdict(fitted.scenario.host), "sources": fitted.sources, "floors": fitted.noise.floors,
    }  # fmt: skip
    return {**result, **errors(figures)}


def errors(figures: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return how far off figures are, of each kind: those expected, the ends of their intervals if any, and those measured."""
    found = {}
    for kind in KINDS:
        expected, *within, real = np.array([some for figure, some in figures.items() if figure.endswith(kind)]).T
        found[kind] = {
            "mean": real[0],
            "error": float(np.abs(expected / real - 1).mean()),
            "p99": float(expected[-1] / real[-1] - 1),
        }
        if within:
            low, high = within
            found[kind] |= {
                "held": float(((low <= real) & (real <= high)).mean()),
                "width": float(np.median(np.log(high / low) / 2)),
            }
    return found


def line(run: dict[str, Any]) -> list[str]:
    kinds = [run[kind] for kind in KINDS]
    cells = (
        f"{k['error']:.1%}, P99 {k['p99']:+.1%}" + (f", {k['held']:.0%} in ±{k['width']:.0%}" if "held" in k else "")
        for k in kinds
    )
    return [run["name"], *cells, f"{run.get('seconds', 0):.0f}", "yes" if run["doubts"] else "no"]


def summary(runs: list[dict[str, Any]], kind: str) -> dict[str, float]:
    """Return median and worst errors of one kind of time, and coverage, of the runs without doubts."""
    sure = [run[kind] for run in runs if not run["doubts"]]
    error, p99, held = (np.abs([each[name] for each in sure]) for name in ("error", "p99", "held"))
    return {"median": np.median(error), "worst": error.max(), "worst p99": p99.max(), "coverage": held.mean()}


def main() -> None:
    parser = report.parser("foreign", __doc__)
    parser.add_argument("logs", nargs="*", type=Path, help="logs to judge instead of made-up servers")
    parser.add_argument("--fitted", type=Path, help="cost file of ./eb probe, instead of a fit to half of each log")
    parser.add_argument("--quick", action="store_true", help=f"{len(QUICK)} made-up servers instead of {len(FULL)}")
    args = parser.parse_args()
    jobs: list[Case | Path] = args.logs or [*(QUICK if args.quick else FULL), *DATA]
    runs: list[dict[str, Any]] = []
    with Pool(2) as pool:
        for run in pool.imap(partial(judged, cost=args.fitted), jobs):
            runs.append(run)
            Console(stderr=True).print(" | ".join(line(run)), soft_wrap=True)
            report.keep(args.json, {"runs": runs})
    report.show(None, ("run", *KINDS, "fit, s", "doubts"), map(line, runs))
    report.finish("foreign", {"runs": runs, "summary": {kind: summary(runs, kind) for kind in KINDS}}, args.json)


if __name__ == "__main__":
    main()
