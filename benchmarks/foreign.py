"""How well a server is predicted from a log of its requests: the fit on the first half of a log, compared with the second half.

    python -m benchmarks.foreign --quick --json benchmarks/results/foreign.json
    python -m benchmarks.foreign docs/data/llama-3.1-8b-rtx4090 my-log.jsonl

Without logs, servers are made up: a roofline with a smooth maximum, experts, graphs of whole sizes, noise of 3 % in each step,
pauses of the machine, delays of the streams. None of that has the form of the law that is fitted. Each serves requests at a part
of its capacity with some scheduler; `told` says whether the log names slots and KV memory. Errors are means over mean, P50, P90,
P95 and P99 of each kind of time; coverage is the share of these 15 figures within their 90 % intervals.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import Pool
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from rich.console import Console

from benchmarks import report
from costs.cost import Cost, Host
from costs.steps import Step
from scheduling.iteration import Plan
from scheduling.scheduler import Output
from simulate.commands.fit import compare
from simulate.engines import known
from simulate.fitting.fit import fit
from simulate.fitting.fitted import Fitted, load
from simulate.logs.log import Log, Reading, Request
from simulate.logs.read import read
from simulate.simulator import Simulation

console = Console(stderr=True, highlight=False)
DATA = sorted((Path(__file__).parents[1] / "docs" / "data").glob("*/"))
KINDS = ("TTFT", "TPOT", "latency")
HEADS = ("run", "TTFT, s", "E2E, s", *KINDS, "p99 latency", "misfit TTFT", "latency", "fit, s", "doubts")


@dataclass(frozen=True)
class Device(Cost):
    """A card with a model: bytes that each step reads, bytes/s, FLOP per token, FLOP/s, and the rest in seconds."""

    weights: float = 16e9
    bandwidth: float = 0.8e12
    flop: float = 16e9
    peak: float = 1.2e14
    kv: float = 131072.0  # bytes per token
    experts: float = 0.0  # bytes of all
    chosen: float = 0.0  # share of the experts that one token needs
    launch: float = 2e-3
    graphs: int = 8  # sizes of recorded graphs are multiples of it
    name = "device"

    def seconds(self, step: Step) -> float:
        rows = step.decodes if step.prompt else -(-step.decodes // self.graphs) * self.graphs
        tokens = rows + step.prompt
        read = self.weights + self.experts * (1 - (1 - self.chosen) ** tokens)
        linear = float(np.hypot((read / self.bandwidth) ** 2, (tokens * self.flop / self.peak) ** 2) ** 0.5)
        attention = step.context * self.kv / self.bandwidth + step.pairs * 1e6 / self.peak
        return self.launch + linear + attention + 8e-6 * step.rows + (2.9e-3 if step.prompt else 0.0)


DEVICES = {
    "8B, slow card": Device(),
    "8B, fast card": Device(bandwidth=2.9e12, peak=6e14, launch=3e-3),
    "32B, two cards": Device(weights=65e9, bandwidth=3e12, flop=64e9, peak=4e14, kv=262144.0),
    "3B, slow host": Device(weights=6e9, flop=6e9, bandwidth=0.9e12, launch=9e-3, kv=114688.0),
    "30B, 128 experts": Device(4e9, 1.6e12, 6e9, 1.5e14, 98304.0, 56e9, 8 / 128, 3e-3),
    "8x7B, 8 experts": Device(4e9, 3e12, 26e9, 5e14, 131072.0, 90e9, 2 / 8),
}


class Case(NamedTuple):
    """A made-up run. `load` is a part of the capacity; with `ramp`, the second half has that many times as many arrivals a second."""

    device: str = "8B, slow card"
    load: float = 0.8
    slots: int = 256
    kv_tokens: int = 0
    engine: str = "vllm"
    told: bool = True
    overlap: bool = True
    ramp: float = 1.0
    streams: bool = False  # the log has the times of all tokens
    requests: int = 300
    assumed: str = ""  # another scheduler than the true one


QUICK = [
    Case(load=0.3), Case(load=0.9), Case(load=1.3, slots=64), Case("8B, fast card", 0.6, 128, told=False),
    Case("32B, two cards", 1.2, 128, 60_000), Case("3B, slow host", 0.5, overlap=False), Case("3B, slow host", 1.2, 32, told=False),
    Case("30B, 128 experts", 0.3), Case("30B, 128 experts", 0.9, 128), Case("8x7B, 8 experts", 1.2, 64), Case(load=0.9, kv_tokens=40_000, told=False),
    Case(load=0.8, engine="sglang"), Case(load=0.9, slots=64, engine="tgi"), Case(load=1.1, slots=16, engine="llama.cpp"),
    Case(load=0.5, ramp=2.5), Case("30B, 128 experts", 0.7, streams=True), Case(load=1.2, slots=32, assumed="tgi"),
]  # fmt: skip
FULL = [
    *QUICK,
    *(Case(d, load, slots, kv) for d, load, (slots, kv) in product(DEVICES, (0.3, 0.7, 1.0, 1.5), ((256, 0), (64, 30_000)))),
    *(Case(d, 0.9, 48, engine=e, told=told) for d, e, told in product(DEVICES, ("vllm", "sglang", "tgi", "llama.cpp"), (True, False))),
]  # fmt: skip


class Server(Simulation):
    """A made-up server: a device with noise, and a pause now and then. `tokens` are the times of each request's."""

    def __init__(self, case: Case, log: Log, rng: np.random.Generator) -> None:
        self.tokens: list[list[float]] = [[] for _ in log.at]
        policy, engine, _ = known.get(case.engine).serve(settings(case), {})
        host = Host(alpha0=2e-3, first_step=0.1)
        super().__init__(
            engine.scheduler(policy), log.trace.sequences(), Shaken(DEVICES[case.device], rng), host, False, False
        )
        self.run()

    def compute(self, plan: Plan) -> list[Output]:
        outputs = super().compute(plan)
        for seq, output in zip(plan.sequences, outputs):
            if output is not None:
                self.tokens[int(seq.id)].append(self.now)
        return outputs


class Shaken(Cost):
    def __init__(self, device: Device, rng: np.random.Generator) -> None:
        self.device, self.rng = device, rng

    def seconds(self, step: Step) -> float:
        pause = 0.2 if self.rng.random() < 2e-4 else 0.0
        return self.device.seconds(step) * float(np.exp(self.rng.normal(0, 0.03))) + pause


def settings(case: Case) -> dict[str, Any]:
    found = {"slots": case.slots, "kv_tokens": case.kv_tokens}
    return {**found, "overlap": case.overlap} if case.engine in ("vllm", "sglang") else found


def log_of(case: Case, seed: int = 0) -> Log:
    """Serve made-up requests with a made-up server, and return its log."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1.0, case.requests) / np.where(np.arange(case.requests) < case.requests // 2, 1.0, case.ramp)
    at = np.cumsum(gaps) - gaps[0]
    prompts = np.clip(rng.lognormal(5.3, 1.4, case.requests), 4, 8000).astype(int).tolist()
    answers = np.clip(rng.lognormal(5.3, 0.9, case.requests), 2, 2000).astype(int).tolist()

    def log(times: np.ndarray, **more: Any) -> Log:
        more = more or {"first": times.tolist(), "last": times.tolist()}  # not served yet
        rows = zip(times.tolist(), prompts, answers, *more.values())
        told = settings(case) if case.told else {}
        return Log.of(Reading([Request(*row[:3], **dict(zip(more, row[3:]))) for row in rows], told))

    burst = Server(case, log(np.zeros(case.requests)), rng)
    at *= (
        2 * float(np.median(np.concatenate(burst.tokens))) / case.requests / case.load
    )  # most tokens come at full batches
    served = Server(case, log(at), rng)
    chunks = [np.maximum.accumulate(np.array(some) + rng.gamma(2, 1e-3, len(some))).tolist() for some in served.tokens]
    times = {"first": [some[0] for some in chunks], "last": [some[-1] for some in chunks]}
    return log(at, **times, **({"chunks": chunks} if case.streams else {}))


def compared(name: str, log: Log, fitted: Fitted, begin: int = 0, seconds: float = 0.0) -> dict[str, Any]:
    """Return how far off a fit predicts the requests of a log, from number `begin` on."""
    fitted = replace(fitted, log=log, scenario=replace(fitted.scenario, rows=log.trace))
    found = compare(fitted, log, np.arange(len(log.at)) >= begin)
    off = {k: float(np.mean([abs(c.error) for c in found if c.name.endswith(k)])) for k in KINDS}
    p99 = next(c.error for c in found if c.name == "p99 latency")
    held = {
        k: float(
            np.mean(
                [c.interval.low <= c.measured <= c.interval.high for c in found if c.interval and c.name.endswith(k)]
            )
        )
        for k in KINDS
    }
    width = {
        k: float(
            np.median(
                [np.log(c.interval.high / c.interval.low) / 2 for c in found if c.interval and c.name.endswith(k)]
            )
        )
        for k in KINDS
    }
    return {
        "name": name, "engine": fitted.kind.name, "error": off, "p99": p99, "held": held, "width": width, "seconds": seconds,
        "misfit": fitted.misfit, "latency": float(np.nanmean(log.last - log.at)), "ttft": float(np.nanmean(log.first - log.at)),
        "doubts": fitted.doubts, "cost": asdict(fitted.law), "host": asdict(fitted.scenario.host), "sources": fitted.sources,
        "floors": fitted.noise.floors, "drift": fitted.noise.drift,
        "figures": {c.name: [c.predicted, *(c.interval or ()), c.measured] for c in found},
    }  # fmt: skip


def run_of(job: Case | Path) -> dict[str, Any]:
    """Fit the first half of a log, and compare the second."""
    if isinstance(job, Case):
        name, log, engine = title(job), log_of(job, crc32(title(job).encode())), job.assumed or job.engine
    else:
        name, log = job.name, read(job)
        engine = str(log.server.get("engine", "vllm"))
    began, half = time.process_time(), len(log.at) // 2
    fitted = fit(log.until(half), known.get(engine))
    return compared(name, log, fitted, half, time.process_time() - began)


def judged_by(fitted: Fitted, log: Path) -> dict[str, Any]:
    return compared(log.name, read(log), fitted)


def title(case: Case) -> str:
    usual = Case()
    return ", ".join(
        [
            case.device,
            *(
                f"{k} {v}"
                for k, v in case._asdict().items()
                if k != "device" and (k == "load" or v != getattr(usual, k))
            ),
        ]
    )


def summary(runs: Many[dict[str, Any]]) -> dict[str, Any]:
    """Return median and worst errors, and coverage, of the runs without doubts."""
    sure = [run for run in runs if not run["doubts"]]
    off = {k: np.array([run["error"][k] for run in sure]) for k in KINDS} | {
        "p99 latency": np.abs([run["p99"] for run in sure])
    }
    return {
        "runs": len(runs), "doubted": len(runs) - len(sure), "seconds": max(run["seconds"] for run in runs),
        "median": {k: float(np.median(v)) for k, v in off.items()}, "worst": {k: float(np.max(v)) for k, v in off.items()},
        "coverage": {k: float(np.mean([run["held"][k] for run in sure])) for k in KINDS},
    }  # fmt: skip


def line(run: dict[str, Any]) -> list[str]:
    return [
        run["name"], f"{run['ttft']:.2f}", f"{run['latency']:.1f}",
        *(f"{run['error'][k]:.1%} ({run['held'][k]:.0%} of ±{run['width'][k]:.0%})" for k in KINDS), f"{run['p99']:+.1%}",
        *(f"{run['misfit'][k]:.1%}" for k in ("ttft", "latency")), f"{run['seconds']:.0f}", f"{len(run['doubts'])}",
    ]  # fmt: skip


def main() -> None:
    parser = report.parser("foreign", __doc__)
    parser.add_argument("logs", nargs="*", type=Path, help="logs to judge instead of made-up servers")
    parser.add_argument(
        "--fitted", type=Path, help="cost file of ./eb fit or ./eb probe, instead of a fit to half of each log"
    )
    parser.add_argument("--quick", action="store_true", help=f"{len(QUICK)} runs instead of {len(FULL)}")
    parser.add_argument("--only", default="", help="runs whose names contain this")
    parser.add_argument("--jobs", type=int, default=2, help="fits at a time")
    args = parser.parse_args()
    jobs: list[Case | Path] = args.logs or [*(QUICK if args.quick else FULL), *DATA]
    jobs = [job for job in jobs if args.only in (title(job) if isinstance(job, Case) else job.name)]
    runs = []
    with Pool(args.jobs) as pool:
        judge = partial(judged_by, load(args.fitted)) if args.fitted else run_of
        for run in pool.imap(judge, jobs):
            runs.append(run)
            console.print(" | ".join(line(run)), soft_wrap=True)
            report.keep(args.json, {"runs": runs})
    report.show(None, HEADS, map(line, runs))
    report.finish("foreign", {"runs": runs, **summary(runs)}, args.json)


if __name__ == "__main__":
    main()
