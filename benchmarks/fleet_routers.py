"""Every router in front of four mock replicas, measured and simulated with the same arrivals.

The replicas share the cores of this machine. Each takes the times of `mock:llm-mock@20` with 8 slots and 1,024 KV pages,
which is what the simulation computes; it knows no HTTP, no ingress and no other process. A router that chooses at random
is simulated with several seeds, of which the means are compared.
"""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.closed_loop import cpu_seconds
from benchmarks.fleet_process import SERVER, Fleet, descendants, running
from client.data import Planned
from client.report.measure import Outcome
from client.send.dialects import Dialect
from client.send.load import LoadRun
from client.send.target import Target
from client.workloads import arrivals, catalog, corpus
from fleet.routers import ROUTERS
from simulate import __main__ as simulator
from simulate.commands.fleet import asking
from simulate.commands.inputs import make_scenario
from simulate.fleet.fleet import Fleet as Simulated
from terminal.options import read

REPLICAS, SLOTS, PAGES, SPEED = 4, 8, 1024, 20
SEEDS = 9  # of the simulations of a router that chooses at random
NAMES = ("round-robin", "least-loaded", "power-of-two", "prefix-aware", "session-sticky")
# By a short name: the workload, and the requests per second at which prompts cost something. The 64 beginnings fill twice
# the pages of a replica. At 14 per second some orders of the same requests already queue for seconds.
LOADS = {"shared-prefix": ("shared-prefix:64:512", 12.0), "chat": ("drawn-turns:6", 20.0)}
BOUNDS = {"mean_s": 0.1, "p99_s": 0.2, "hit_rate": 0.1, "busiest": 0.1}  # by which a simulation may be wrong
UNITS = {"mean_s": 1e3, "p99_s": 1e3, "mean_ttft_s": 1e3, "hit_rate": 100, "busiest": 1}


def shares(requests: list[int]) -> float:
    """Return the requests of the busiest replica by the mean of all."""
    return max(requests) * len(requests) / sum(requests)


def summed_up(latency: Any, ttft: Any, hits: float, busiest: float) -> dict[str, float]:
    """Return the figures that are compared."""
    return {
        "mean_s": float(np.mean(latency)), "p99_s": float(np.percentile(latency, 99)), "mean_ttft_s": float(np.mean(ttft)),
        "hit_rate": hits, "busiest": busiest,
    }  # fmt: skip


def simulated(workload: str, rate: float, count: int, router: str, names: list[str]) -> dict[str, Any]:
    """Return the means over the seeds, and the lowest and the highest of each figure."""
    argv = [
        "dynamic", "--workload", workload, "--rate", str(rate), "--num", str(count), "--replicas", str(len(names)),
        "--router", router, "--kv-tokens", str(PAGES * 16), "--max-batch-size", str(SLOTS), "--cost", "llm-mock",
        "--cost-option", f"rate={468000 * SPEED}", "--cost-option", f"base={0.06 / SPEED}",
    ]  # fmt: skip
    args = read(simulator.build_command("fleet"), argv)
    scenario = make_scenario(args, Console(quiet=True), reported={"client"}, draws_more=True)
    rows = scenario.rows
    found = []
    for seed in range(1 if router == "round-robin" else SEEDS):
        schedulers = [scenario.engine.scheduler(scenario.policies[0]) for _ in names]
        fleet = Simulated(schedulers, scenario.cost, scenario.host, gaps=False, names=names)
        run = fleet.run(rows.arriving(), ROUTERS[router](random.Random(seed)), asking(rows))
        found.append(summed_up(run.latency, run.ttft, run.hit_rate, run.busiest))
    return {
        "mean": {key: float(np.mean([one[key] for one in found])) for key in UNITS},
        "range": {key: [min(one[key] for one in found), max(one[key] for one in found)] for key in UNITS},
        "command": "python -m simulate fleet " + " ".join(argv),
    }


async def measured(workload: str, rate: float, count: int, router: str) -> tuple[dict[str, Any], list[str]]:
    """Send the requests to a new fleet; return the figures, and the names of the replicas."""
    process = arrivals.Arrivals("poisson", rate)
    planned = catalog.draw(workload, count, process, 0, corpus.load()).planned
    options = ["dynamic", "--model", f"mock:llm-mock@{SPEED}", "--max-batch-size", str(SLOTS), "--router", router]
    async with running(REPLICAS, *options) as (fleet, session, _):
        before = cores(fleet)
        outcomes = await asyncio.to_thread(sent, fleet.url, planned)
        seconds = max(one.ended for one in outcomes)
        spent = {name: round((now - before[name]) / seconds, 2) for name, now in cores(fleet).items()}
        requests = {name: one["requests"] for name, one in (await fleet.stats(session)).items()}
    hits = sum(one.cached_tokens or 0 for one in outcomes) / sum(one.prompt_tokens or 0 for one in outcomes)
    figures = summed_up(
        [one.latency for one in outcomes], [one.ttft for one in outcomes], hits, shares(list(requests.values()))
    )
    return {**figures, "requests": list(requests.values()), "cores_taken": spent}, list(requests)


def sent(url: str, planned: list[Planned]) -> list[Outcome]:
    """Send the requests at their times; SystemExit if one fails."""
    run = LoadRun(Target(url, dialect=Dialect(stream=True)), planned)
    run.start()
    run.wait()
    outcomes = run.outcomes()
    if failed := [one for one in outcomes if one.error]:
        raise SystemExit(
            f"error: {len(failed)} of {len(outcomes)} requests failed: {failed[0].error} {failed[0].detail}"
        )
    return outcomes


def cores(fleet: Fleet) -> dict[str, float]:
    """Return the processor seconds that the servers, the ingress and Ray have taken so far."""
    found = {"servers": 0.0, "ingress": cpu_seconds(fleet.process.pid), "ray": 0.0}
    for pid, command in set(descendants(fleet.process.pid)):
        found["servers" if SERVER in command or "app.py" in command else "ray"] += cpu_seconds(pid)
    return found


async def measure_routers(args: Any) -> dict[str, Any]:
    """Return measured and simulated figures of each router, for each workload; print them as a table."""
    console, found = Console(stderr=True, width=120), []
    for name in args.loads:
        workload, rate = LOADS[name]
        for router in args.routers:
            real, names = await measured(workload, rate, args.count, router)
            model = simulated(workload, rate, args.count, router, names)
            errors = {key: model["mean"][key] / real[key] - 1 if real[key] else 0.0 for key in UNITS}
            found.append({
                "workload": workload, "rate": rate, "router": router, "measured": real, "simulated": model, "errors": errors,
                "beyond": [key for key, bound in BOUNDS.items() if abs(errors[key]) > bound],
            })  # fmt: skip
            report.keep(
                args.json, {"requests": args.count, "replicas": REPLICAS, "runs": found}
            )  # if a later one fails
            print(f"{name}, {router}: {errors}", file=sys.stderr, flush=True)
    show(console, found)
    return {"requests": args.count, "replicas": REPLICAS, "runs": found}


def show(console: Console, found: list[dict[str, Any]]) -> None:
    """Print measured / simulated figures, with the error of the simulation."""
    table = Table(title="measured / simulated, and the error of the simulation")
    for head in ("workload", "router", "mean, ms", "p99, ms", "mean TTFT, ms", "hits, %", "busiest / mean"):
        table.add_column(head, no_wrap=head == "router")
    for row in found:
        cells = (
            f"{row['measured'][key] * unit:.3g} / {row['simulated']['mean'][key] * unit:.3g} {row['errors'][key]:+.0%}"
            for key, unit in UNITS.items()
        )
        table.add_row(row["workload"], row["router"], *cells)
    console.print(table)
