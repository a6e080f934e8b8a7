"""Simulator accuracy: the same arrivals through a real server and through the simulator.

A server is started in a process of its own and receives streamed HTTP requests. The first ones are sent one at a
time: what their client waits beside the steps, and what the steps take beyond the cost model, is the host's overhead. Then
follows the open loop, which is also simulated. A figure whose error is beyond its bound fails the command.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import config
from client.data import Planned
from client.display import Display
from client.report.measure import Outcome
from client.send import load, servers
from client.send.dialects import Dialect
from client.send.events import EventRecorder
from client.send.target import Target, fetch_stats, known
from costs.cost import Cost, Host
from simulate.measured import comparison
from simulate.measured.comparison import Comparison
from simulate.measured.intervals import Interval, Noise
from simulate.measured.served import Record, Served
from simulate.scenario import Chosen
from simulate.simulator import Run

ALONE = (4, 32)  # tokens of the requests that are sent one at a time
TIMES = 5
LONG, SHORT = 64, 10  # tokens of a request beside which others are sent, and how many these are
WORDS = ("the", "king", "of", "this", "house", "is", "not", "a", "man", "who", "will", "go")
# Settings of the server that this command decides, or has its own options for.
OWN = ("policy", "policy_option", "max_batch_size", "max_tokens_per_step", "host", "port", "api_key")
SERVER = [item.name for item in fields(config.Config) if item.name not in OWN]


@dataclass(frozen=True)
class Validation:
    """One policy's run, simulated and served."""

    host: Host
    run: Run
    served: Served
    intervals: dict[str, Interval] = field(default_factory=dict)

    @property
    def compared(self) -> list[Comparison]:
        return comparison.compare(self.run, self.served, self.intervals)

    @property
    def steps(self) -> tuple[Sequence[Record], Sequence[Record]]:
        """The steps, predicted and measured."""
        return comparison.steps_of(self.run), self.served.records

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as a JSON object."""
        sides = dict(zip(("predicted", "measured"), self.steps))
        sizes = {side: comparison.batch_sizes(steps) for side, steps in sides.items()}
        return {
            "policy": self.served.chosen.name,
            "host": asdict(self.host),
            "compared": [c.to_dict() for c in self.compared],
            "steps": {side: len(steps) for side, steps in sides.items()},
            "batch_sizes": {side: dict(sorted(count.items())) for side, count in sizes.items()},
            "agreement": comparison.agreement(*self.steps),
        }


def serve(
    chosen: Chosen, flags: Sequence[str], trace: Sequence[Planned], console: Console
) -> tuple[Served, Served, Served]:
    """Send requests one at a time, some beside others, and then the trace, to a new server; RuntimeError when it fails."""
    texts = [(f"{word} the king of this house", n) for word in WORDS[: TIMES + 1] for n in ALONE]
    with server(chosen.name, flags, console) as reached:
        there = known(reached)
        alone = observe(there, chosen, [Planned(i, 0.0, *each) for i, each in enumerate(texts)], console, users=1)
        alone = replace(alone, outcomes=alone.outcomes[len(ALONE) :])  # the first ones warm up
        pace = max(o.latency / o.tokens for o in alone.outcomes)
        beside = observe(there, chosen, besides(pace), console)
        return alone, beside, observe(there, chosen, trace, console)


def besides(pace: float) -> list[Planned]:
    """Draw short requests at random times beside long ones, which follow each other; `pace` is about what a token takes."""
    lasts, rng = pace * LONG, np.random.default_rng(0)
    short = rng.uniform(0, lasts * TIMES, SHORT * TIMES).tolist()
    asked = sorted([*((lasts * i, LONG) for i in range(TIMES)), *((at, min(ALONE)) for at in short)])
    return [Planned(i, at, f"{WORDS[i % len(WORDS)]} {i} of this house", n) for i, (at, n) in enumerate(asked)]


@contextmanager
def server(policy: str, flags: Sequence[str], console: Console) -> Iterator[Target]:
    """Yield a server that was started with these flags; RuntimeError when it does not start."""
    console.print(f"{policy}: starting its server", highlight=False)
    key = config.load().config.api_key or None
    with (
        tempfile.TemporaryDirectory() as folder,
        servers.started(policy, flags, Path(folder) / "server.log", key) as (url, _),
    ):
        yield Target(url, api_key=key, dialect=Dialect("inference", stream=True))


def observe(
    target: Target, chosen: Chosen, trace: Sequence[Planned], console: Console | None, users: int | None = None
) -> Served:
    """Send a trace to a server and return its outcomes and steps; RuntimeError when a request fails."""
    lines = io.StringIO()
    events = EventRecorder(target, lines)
    events.start()
    if not events.is_connected():
        raise RuntimeError("the server sends no /events, so its steps are unknown")
    events.label({"run": chosen.name})
    try:
        outcomes = send(target, trace, console, users)
        events.settle()
    finally:
        events.close()
    stats = fetch_stats(target) or {}
    records = [json.loads(line) for line in lines.getvalue().splitlines()]
    return Served(chosen, outcomes, records, stats["engine"], [p.call for p in trace if p.call])


def draw(rate: float, count: int, seed: int, most: int = 128) -> list[Planned]:
    """Draw Poisson arrivals of short prompts and U{1..most} output tokens; no two prompts share a page."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count))
    return [
        Planned(i, float(at), " ".join(rng.choice(WORDS, int(rng.integers(4, 40)))), int(rng.integers(1, most + 1)))
        for i, at in enumerate(times)
    ]


def send(target: Target, trace: Sequence[Planned], console: Console | None, users: int | None) -> list[Outcome]:
    """Send a trace, at its times or by `users`, and return the outcomes, in order; RuntimeError when one fails."""
    run = load.LoadRun(target, trace, users)
    with Display(run, console, trace[-1].at) if console else nullcontext():
        run.start()
        run.wait()
    outcomes = sorted(run.outcomes(), key=lambda outcome: outcome.index)
    failed = [outcome for outcome in outcomes if outcome.error]
    if failed:
        raise RuntimeError(
            f"{len(failed)} of {len(outcomes)} requests failed: {failed[0].error} {failed[0].detail}. Lower --rate"
        )
    return outcomes


def validate(
    chosen: Chosen,
    cost: Cost,
    trace: Sequence[Planned],
    flags: Sequence[str],
    console: Console,
    noise: Noise | None = None,
) -> Validation:
    """Serve a trace and simulate it, with the host overheads measured before; intervals need the law's noise."""
    options = [word for name, value in chosen.options.items() for word in ("--policy-option", f"{name}={value}")]
    flags = [*flags, *options]
    alone, beside, served = serve(chosen, flags, trace, console)
    host = alone.host(cost)
    # What a request takes from a step delays itself and the step, each by at most as long as it takes.
    host = replace(host, receive=min(beside.late(host), 2 * host.alpha0))
    run = served.simulate(cost, host, records=True)
    within = noise.intervals(lambda law: served.simulate(law, host), cost, run) if noise else {}
    return Validation(host, run, served, within)
