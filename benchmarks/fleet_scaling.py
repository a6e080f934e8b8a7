"""The number of replicas over time under `--autoscaler`, measured and simulated with the same arrivals, on one picture.

A replica counts from the start of its actor until that is gone. The simulation gets the time that a replica took to start
here, and the delays and the average of Ray Serve; it knows no HTTP and no other process.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console

from benchmarks.fleet_process import ACTOR, Fleet, running
from benchmarks.fleet_routers import sent
from client.workloads import arrivals, catalog, corpus
from fleet.autoscalers import AUTOSCALERS
from fleet.options import AVERAGE_SECONDS
from simulate import __main__ as simulator
from simulate.commands.fleet import serve
from simulate.commands.inputs import make_scenario
from simulate.fleet.fleet_run import FleetRun
from terminal.options import read

LEAST, MOST, SLOTS, PAGES, SPEED = 1, 4, 4, 512, 5
UP, DOWN = 2.0, 5.0  # --upscale-delay and --downscale-delay
WORKLOAD = "fixed:64:64"
LOADS = {"onoff:4:20": 240, "ramp:0.5:10": 300}  # requests of each
POLL = 0.25  # seconds between two looks at the processes
TAIL = 12.0  # seconds after the last answer, in which replicas end


class Watch:
    """What was there at each look: the actors, and the replicas that are ready."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.times: list[float] = []
        self.paid: list[int] = []
        self.ready: list[int] = []
        self.starts: dict[int, float] = {}  # of each actor
        self.opened: dict[str, float] = {}  # of each replica

    async def run(self, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        """Look until cancelled."""
        while True:
            actors = [pid for pid, _ in fleet.find(ACTOR)]
            ready: list[str] = []
            with contextlib.suppress(aiohttp.ClientError, ValueError, KeyError):
                ready = await fleet.replicas(session)
            now = time.perf_counter() - self.began
            for pid in actors:
                self.starts.setdefault(pid, now)
            for name in ready:
                self.opened.setdefault(name, now)
            self.times.append(now)
            self.paid.append(len(actors))
            self.ready.append(len(ready))
            await asyncio.sleep(POLL)

    def startup(self) -> float:
        """Return the median seconds from the start of an actor until its replica was ready, without the first ones."""
        pairs = zip(sorted(self.starts.values())[LEAST:], sorted(self.opened.values())[LEAST:])
        return statistics.median([opened - start for start, opened in pairs] or [0.0])


async def measured(load: str, count: int, autoscaler: str) -> tuple[Watch, float]:
    """Send the requests to a new fleet; return what was seen from the first one on, and the mean latency."""
    planned = catalog.draw(WORKLOAD, count, arrivals.parse(load), 0, corpus.load()).planned
    options = ["dynamic", "--model", f"mock:llm-mock@{SPEED}", "--max-batch-size", str(SLOTS), "--router", "least-loaded",
               "--autoscaler", autoscaler, "--upscale-delay", str(UP), "--downscale-delay", str(DOWN)]  # fmt: skip
    async with running(LEAST, *options, most=MOST) as (fleet, session, _):
        watch = Watch()
        watching = asyncio.create_task(watch.run(fleet, session))
        outcomes = await asyncio.to_thread(sent, fleet.url, planned)
        await asyncio.sleep(TAIL)
        watching.cancel()
    return watch, statistics.mean(one.latency for one in outcomes)


def simulated(load: str, count: int, autoscaler: str, startup: float) -> tuple[FleetRun, Any, str]:
    """Return the simulation of the same requests, their times of arrival, and its command."""
    argv = [
        "dynamic", "--workload", WORKLOAD, "--arrivals", load, "--num", str(count), "--replicas", f"{LEAST}..{MOST}",
        "--router", "least-loaded", "--autoscaler", autoscaler, "--startup", f"{startup:.1f}", "--upscale-delay", str(UP),
        "--downscale-delay", str(DOWN), "--average", str(AVERAGE_SECONDS), "--kv-tokens", str(PAGES * 16),
        "--max-batch-size", str(SLOTS), "--cost", "llm-mock", "--cost-option", f"rate={468000 * SPEED}",
        "--cost-option", f"base={0.06 / SPEED}",
    ]  # fmt: skip
    args = read(simulator.build_command("fleet"), argv)
    scenario = make_scenario(args, Console(quiet=True), draws_more=True)
    run = serve(args, scenario, scenario.policies[0], autoscaler, 0, "least-loaded")
    return run, scenario.rows.at, " ".join(argv)


async def measure_scaling(args: Any) -> dict[str, Any]:
    """Return the replicas over time, measured and simulated, for each load; draw them."""
    found = []
    for load, count in LOADS.items():
        watch, latency = await measured(load, count, args.autoscaler)
        run, at, command = simulated(load, count, args.autoscaler, watch.startup())
        end = run.ended - run.began
        found.append({
            "load": load, "requests": count, "startup_s": round(watch.startup(), 1), "arrivals": np.round(at, 2).tolist(),
            "measured": {"at": np.round(watch.times, 2).tolist(), "replicas": watch.paid, "ready": watch.ready},
            "simulated": {
                "at": [round(when - run.began, 2) for when, *_ in run.history] + [round(end, 2)],
                "replicas": [sum(counts) for _, *counts in run.history], "ready": [ready for _, ready, *_ in run.history],
            },
            "mean_replicas": {"measured": mean_until(watch, end), "simulated": run.mean_replicas},
            "mean_s": {"measured": latency, "simulated": float(run.latency.mean())},
            "command": "python -m simulate fleet " + command,
        })  # fmt: skip
    if args.picture:
        draw(found, args.picture)
    return {"autoscaler": args.autoscaler, "runs": found}


def mean_until(watch: Watch, end: float) -> float:
    """Return the mean number of replicas until a time."""
    return float(np.mean([paid for at, paid in zip(watch.times, watch.paid) if at <= end]))


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw the replicas of each load over time above the rate of its arrivals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    columns = figure.subplots(2, len(found), sharex="col", sharey="row", height_ratios=(3, 1), squeeze=False)
    for (upper, lower), row in zip(columns.T, found):
        times = row["measured"]["at"]
        upper.stairs(row["measured"]["replicas"][:-1], times, baseline=None, label="measured", linewidth=2)
        upper.stairs(
            row["simulated"]["replicas"], row["simulated"]["at"], baseline=None, label="simulated", linewidth=2,
            linestyle="--",
        )  # fmt: skip
        upper.set(title=row["load"], yticks=range(MOST + 1), ylim=(0, MOST + 0.3))
        upper.grid(axis="y", alpha=0.3)
        last = row["arrivals"][-1]
        rates, edges = np.histogram(row["arrivals"], bins=40, range=(0, last))
        lower.stairs(rates * 40 / last, edges, fill=True, alpha=0.5)
        lower.set(xlabel="seconds")
    columns[0][0].set(ylabel="replicas, starting ones too")
    columns[1][0].set(ylabel="requests/s")
    columns[0][-1].legend(loc="upper left")  # where the load rises late, it hides nothing
    figure.savefig(path, dpi=90)


def add_options(parser: Any) -> None:
    """Add the options of this part."""
    parser.add_argument(
        "--autoscaler", default="tokens", help=f"of scaling: {', '.join(AUTOSCALERS)} (default %(default)s)"
    )
    parser.add_argument("--picture", type=Path, help="of scaling: draw the replicas over time into this file")
