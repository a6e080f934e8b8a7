"""Predictions with their 90 % intervals beside measurements, of runs that the fit never saw.

    python -m dev.benchmarks.intervals --model smollm2 --trace VTC__real.csv --json dev/benchmarks/results/intervals-smollm2.json

A server is started for each policy. After a burst and a warm-up come runs at two utilizations with two loads: ours, of U{1..128}
tokens as `./eb simulate validate` sends them, and requests of a trace, their lengths divided by --shorter. Each is predicted
by a law that is fitted to the steps of the four runs before it. What the runs before missed by sets the width of the next intervals;
the first --unseen runs of a policy serve that alone and are not counted. Beside it stands what the law of a run's own steps gives:
what is still off then is the simulator's, the rest is the machine's, whose speed changes from run to run. `--markdown FILE...`
prints the table of earlier results and measures nothing.
"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from client.data import Planned
from client.report.measure import Outcome
from client.workloads import corpus, traces
from costs.cost import Cost, Host
from dev.benchmarks import report
from simulate.measured import observed_law, validate
from simulate.measured.comparison import Comparison
from simulate.measured.intervals import LEVEL, Noise
from simulate.measured.served import Served, lasting, step_of
from simulate.scenario import Chosen

Trace = Sequence[Planned]
Learned = tuple[Cost, Host, Noise]
RECENT = 4  # runs to fit
WINDOWS = 4  # parts of a fitted run, whose drifts stand for those of runs
BOUNDS = {"makespan": 0.05, "mean latency": 0.10, "p99 latency": 0.20}
console = Console(stderr=True, highlight=False)


def requests(load: str, args: Namespace, seed: int, count: int) -> Trace:
    """Return requests at about one a second: ours, or of the trace another part for each seed."""
    if load == "ours":
        return validate.draw(1.0, count, seed)
    rows = traces.read(args.trace).rows
    first = seed * 61 % max(1, len(rows) - count)
    rows = rows[first : first + count]
    words, rng = corpus.load(), np.random.default_rng(seed)
    pace = len(rows) / (rows[-1].at - rows[0].at)
    texts = [words.piece(rng, max(4, row.prompt_tokens // args.shorter)) for row in rows]
    tokens = [max(1, row.num_tokens // args.shorter) for row in rows]
    return [Planned(i, (rows[i].at - rows[0].at) * pace, text, tokens[i]) for i, text in enumerate(texts)]


def learn(runs: Sequence[Served]) -> Learned:
    """Fit law, host and noise to runs of a server."""
    padded = runs[0].scheduler().policy.padded
    steps = [[step_of(record, padded) for record in served.records] for served in runs]
    seconds = [lasting(served.records) for served in runs]
    law, _ = observed_law.fit([*chain(*steps)], [*chain(*seconds)])
    groups = [
        (np.array([law.seconds(some[i]) for i in part]), np.array(took)[part])
        for some, took in zip(steps, seconds)
        for part in np.array_split(np.arange(len(some)), WINDOWS)
    ]
    every = replace(
        runs[0],
        outcomes=[*chain(*(served.outcomes for served in runs))],
        records=[*chain(*(served.records for served in runs))],
    )
    return law, every.host(law), Noise.of(groups)


def drawn(make: Callable[[int], Trace], wanted: float, args: Namespace, policy: str, learned: Learned) -> Trace:
    """Return a load of about --seconds, at the rate at which the engine is expected to compute for `wanted` of the time."""

    def paced(count: int) -> tuple[float, Trace]:
        trace, low, high = make(count), 0.01, 1000.0
        words = [len(p.prompt.split()) for p in trace]
        for _ in range(14):
            rate = math.sqrt(low * high)
            played = [replace(p, at=p.at / rate) for p in trace]
            known = [
                Outcome(p.index, p.num_tokens, p.at, p.at, p.at, p.num_tokens, prompt_tokens=n, id=str(p.index))
                for p, n in zip(played, words)
            ]
            run = Served(Chosen(policy), known, [], {"max_batch_size": args.slots}).simulate(*learned[:2])
            low, high = (low, rate) if run.busy > wanted * run.makespan else (rate, high)
        return rate, played

    return paced(max(8, round(paced(24)[0] * args.seconds)))[1]


def served_by(policy: str, args: Namespace, scores: list[float]) -> Iterator[dict[str, Any]]:
    """Start a server, fit, and yield each run; `scores` grow by what each missed by."""
    flags = ["--model", args.model, "--load-format", args.load_format, "--dtype", args.dtype, "--quantize", args.quantize,
             "--max-batch-size", str(args.slots), "--prefix-cache", "off", "--speculate", "off", "--access-log", "off"]  # fmt: skip
    with validate.server(policy, flags, console) as target:
        send = partial(validate.observe, target, Chosen(policy), console=None)
        send([Planned(0, 0.0, "warm up", 8)])
        burst: Trace = [replace(p, at=0.0) for p in requests("ours", args, 1, args.slots)]
        runs = [send(burst)]
        first = drawn(partial(requests, "trace", args, 1), 0.65, args, policy, learn(runs))
        runs.append(send(first))
        kinds = [*product(("ours", "trace"), (0.5, 0.8))]
        for number in range(-args.unseen, args.runs):
            load, wanted = kinds[number % len(kinds)]
            learned = learn(runs[-RECENT:])
            trace = drawn(partial(requests, load, args, 100 + number), wanted, args, policy, learned)
            served = send(trace)
            runs.append(served)
            law, host, noise = learned
            noise = replace(noise, widened=noise.widened * (widening := widening_of(scores)))
            run = served.simulate(law, host, records=True)
            within = noise.intervals(partial(served.simulate, host=host), law, run)
            found = validate.Validation(host, run, served, within)
            scores += [widening * score(c) for c in found.compared if c.interval]
            own = validate.Validation(host, served.simulate(*learn([served])[:2], records=True), served)
            yield {
                "model": args.model, "policy": policy, "load": load, "wanted": wanted, "utilization": found.compared[0].measured,
                "requests": len(trace), "counted": number >= 0, "widening": widening,
                "figures": {c.name: [c.predicted, *c.interval, c.measured] for c in found.compared if c.interval},
                "own_steps": {c.name: c.predicted for c in own.compared if c.name in BOUNDS},
            }  # fmt: skip


def widening_of(scores: Sequence[float]) -> float:
    """Return the factor that would have been enough for 90 % of the figures so far and the next one; 1 for fewer than nine."""
    rank = math.ceil((len(scores) + 1) * LEVEL)
    return sorted(scores)[rank - 1] if 0 < rank <= len(scores) else 1.0


def score(figure: Comparison) -> float:
    """Return how much wider the interval of a figure had to be to hold the measurement (split conformal prediction with scaled scores).

    Lei, G'Sell, Rinaldo, Tibshirani and Wasserman, JASA 113, 2018, sections 2.2 and 5.2.
    """
    assert figure.interval is not None
    off = math.log(figure.measured / figure.predicted)
    width = math.log((figure.interval.high if off > 0 else figure.interval.low) / figure.predicted)
    return off / width if width else math.inf if off else 0.0


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return coverage and shares within the bounds, of the runs that count."""
    figures = [(name, *values) for run in runs if run["counted"] for name, values in run["figures"].items()]
    held = [low <= measured <= high for _, _, low, high, measured in figures]
    good = {n: [abs(p / m - 1) <= bound for name, p, _, _, m in figures if name == n] for n, bound in BOUNDS.items()}
    own = {
        n: [abs(run["own_steps"][n] / run["figures"][n][-1] - 1) <= bound for run in runs if run["counted"]]
        for n, bound in BOUNDS.items()
    }
    return {
        "predictions": len(held),
        "coverage": float(np.mean(held)),
        "within": {n: float(np.mean(g)) for n, g in good.items()},
        "within_by_own_steps": {n: float(np.mean(g)) for n, g in own.items()},
    }


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """Return a table with a line for each run that counts, and the summary."""
    heads = ["model", "policy", "load", "utilization", *(f"{name}, s" for name in BOUNDS)]
    lines = [heads, ["---"] * len(heads)]
    for run in runs:
        cells = [f"{p:.2f} ({low:.2f} to {high:.2f}) / {m:.2f}" for p, low, high, m in run["figures"].values()]
        if run["counted"]:
            lines.append([run["model"], f"`{run['policy']}`", run["load"], f"{run['utilization']:.2f}", *cells])
    told = summary(runs)
    within, own = (
        ", ".join(f"{name} within {BOUNDS[name]:.0%} in {share:.0%} of the runs" for name, share in told[key].items())
        for key in ("within", "within_by_own_steps")
    )
    words = f"{told['coverage']:.0%} of {told['predictions']} intervals hold the measurement; {within}. By a run's own steps: {own}."
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", words])


def main() -> None:
    parser = report.parser("intervals", __doc__)
    report.add_model(parser)
    parser.add_argument("--policies", type=lambda t: t.split(","), default=["dynamic", "static"])
    parser.add_argument("--trace", type=Path, help="second load, such as VTC__real.csv of VTC's artifact")
    parser.add_argument("--shorter", type=int, default=4, help="divisor of the trace's lengths")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0, help="of the arrivals of a run")
    parser.add_argument("--runs", type=int, default=8, help="runs of each policy that count")
    parser.add_argument("--unseen", type=int, default=4, help="first runs of each policy, which only set the widths")
    parser.add_argument("--markdown", type=Path, nargs="+", default=[], help="print the table of these results")
    args = parser.parse_args()
    if args.markdown:
        print(markdown([run for file in args.markdown for run in json.loads(file.read_text())["runs"]]))
        return
    runs: list[dict[str, Any]] = []
    scores: list[float] = []
    for policy in args.policies:
        for run in served_by(policy, args, scores):
            runs.append(run)
            console.print(run)
            report.keep(args.json, {"runs": runs})
    report.finish("intervals", {"runs": runs, **summary(runs)}, args.json)


if __name__ == "__main__":
    main()
