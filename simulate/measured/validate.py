"""Simulator accuracy: the same arrivals through a real server and through the simulator.

A server is started in a process of its own and receives streamed HTTP requests. The first ones are sent one at a time, in
two lengths: the time that they take beyond the cost model is the host's overhead per request and per step. Then follows
the open loop, which is also simulated. A figure whose error is beyond its bound fails the command.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields
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
from client.send.target import Target, fetch_stats
from costs import drafting, mock
from costs.cost import Cost, Host
from scheduling.sequence import Sequence
from scheduling.speculation import Speculator
from simulate.measured import comparison, intervals
from simulate.measured.comparison import Comparison
from simulate.measured.intervals import Interval, Noise
from simulate.measured.served import Record, Served
from simulate.scenario import Chosen, Engine
from simulate.simulator import Run, simulate
from terminal.progress import counted

ALONE = (4, 32)  # tokens of the requests that are sent one at a time
TIMES = 5
WORDS = ("the", "king", "of", "this", "house", "is", "not", "a", "man", "who", "will", "go")
# Settings of the server that this command decides, or has its own options for.
OWN = ("policy", "policy_option", "max_batch_size", "max_tokens_per_step", "host", "port", "api_key")
SERVER = [item.name for item in fields(config.Config) if item.name not in OWN]


@dataclass(frozen=True)
class Single:
    """Requests sent one at a time: median seconds by output tokens, to the first token, and their prompt tokens."""

    seconds: dict[int, float]
    first: float
    prompt: int


@dataclass(frozen=True)
class Validation:
    """One policy's run, simulated and served."""

    policy: str
    host: Host
    run: Run
    served: Served
    intervals: dict[str, Interval] = field(default_factory=dict)

    @property
    def compared(self) -> list[Comparison]:
        return comparison.compare(self.run, self.served, self.intervals)

    def scores(self, noise: Noise) -> list[float]:
        """Return how much wider the intervals of this noise had to be to hold the measurements."""
        return [noise.score(c.predicted, c.interval, c.measured) for c in self.compared if c.interval]

    @property
    def steps(self) -> tuple[Many[Record], Many[Record]]:
        """The steps, predicted and measured."""
        return comparison.steps_of(self.run), self.served.records

    @property
    def agreement(self) -> float:
        return comparison.agreement(*self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as a JSON object."""
        sides = dict(zip(("predicted", "measured"), self.steps))
        sizes = {side: comparison.batch_sizes(steps) for side, steps in sides.items()}
        return {
            "policy": self.policy,
            "host": asdict(self.host),
            "compared": [{**asdict(c), "error": c.error, "good": c.good} for c in self.compared],
            "steps": {side: len(steps) for side, steps in sides.items()},
            "batch_sizes": {side: dict(sorted(count.items())) for side, count in sizes.items()},
            "agreement": self.agreement,
        }


def settings(flags: Many[str]) -> config.Config:
    """Return the settings of a server with these flags; UsageError for a wrong one."""
    return config.load(flags).config


def serve(chosen: Chosen, flags: Many[str], trace: Many[Planned], console: Console) -> tuple[Served, Single]:
    """Start a server, send it single requests and then the trace; RuntimeError when it fails."""
    with server(chosen.name, flags, console) as target:
        single = measure_alone(target, console)
        return observe(target, chosen, trace, console), single


@contextmanager
def server(policy: str, flags: Many[str], console: Console) -> Iterator[Target]:
    """Yield a server that was started with these flags; RuntimeError when it does not start."""
    console.print(f"{policy}: starting its server", highlight=False)
    key = config.load().config.api_key or None
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            servers.started(policy, flags, Path(folder) / "server.log", key) as url,
        ):
            yield Target(url, api_key=key, dialect=Dialect(stream=True))
    except servers.ServerFailed as error:
        raise RuntimeError(f"the server did not start: {error}") from error


def observe(target: Target, chosen: Chosen, trace: Many[Planned], console: Console | None) -> Served:
    """Send a trace to a server and return its outcomes and steps; RuntimeError when a request fails."""
    lines = io.StringIO()
    events = EventRecorder(target, lines)
    events.start()
    if not events.is_connected():
        raise RuntimeError("the server sends no /events, so its steps are unknown")
    events.label({"run": chosen.name})
    try:
        outcomes = send(target, trace, console)
        events.settle()
    finally:
        events.close()
    stats = fetch_stats(target) or {}
    records = [json.loads(line) for line in lines.getvalue().splitlines()]
    return Served(chosen, outcomes, records, stats["engine"])


def draw(rate: float, count: int, seed: int, most: int = 128) -> list[Planned]:
    """Draw Poisson arrivals of short prompts and U{1..most} output tokens; no two prompts share a page."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count))
    return [
        Planned(i, float(at), " ".join(rng.choice(WORDS, int(rng.integers(4, 40)))), int(rng.integers(1, most + 1)))
        for i, at in enumerate(times)
    ]


def send(target: Target, trace: Many[Planned], console: Console | None = None) -> list[Outcome]:
    """Send a trace at its times and return the outcomes, in order; RuntimeError when one fails."""
    run = load.LoadRun(target, trace)
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


def speculator_of(server: config.Config) -> Speculator | None:
    """Return a speculator like that of a mock model that has one."""
    if (
        not mock.is_mock(server.model)
        or not server.mock_acceptance
        or server.speculate == "off"
        or server.drafts == "0"
    ):
        return None
    return drafting.speculator(server.mock_acceptance, server.drafts)


def alone(cost: Cost, prompt: int, tokens: int, speculator: Speculator | None = None) -> Run:
    """Simulate one request on its own."""
    scheduler = Engine(1, speculator=lambda: speculator).scheduler(Chosen("nobatch"))
    return simulate(scheduler, [Sequence([0] * prompt, tokens)], cost)


def fit_host(cost: Cost, single: Single, server: config.Config | None = None) -> Host:
    """Return the overheads per request and per step that explain requests sent one at a time, none below 0.

    The overhead before the scheduler sees a request is the time to its first token beyond its first step.
    """
    (n0, t0), (n1, t1) = sorted(single.seconds.items())
    short, long = (alone(cost, single.prompt, n, speculator_of(server) if server else None) for n in (n0, n1))
    over0, over1 = t0 - float(short.latency[0]), t1 - float(long.latency[0])
    sigma = max(0.0, (over1 - over0) / (n1 - n0))
    alpha = max(0.0, over0 - n0 * sigma)
    before = min(alpha, max(0.0, single.first - float(short.ttft[0]) - sigma))
    return Host(alpha0=before, alpha1=alpha - before, sigma=sigma)


def measure_alone(target: Target, console: Console) -> Single:
    """Send single requests, one after the other."""
    prompt = "the king of this house"
    outcomes_of: dict[int, list[Outcome]] = {n: [] for n in ALONE}
    planned = [(f"{word} {prompt}", n) for word in WORDS[: TIMES + 1] for n in ALONE]
    with counted(console, len(planned), "requests sent one at a time") as progress:
        for number, (text, n) in enumerate(planned, 1):
            outcomes_of[n] += send(target, [Planned(0, 0.0, text, n)])
            progress(number)
    kept = {n: outcomes[1:] for n, outcomes in outcomes_of.items()}  # the first warms up
    seconds = {n: float(np.median([o.latency for o in some])) for n, some in kept.items()}
    every = [outcome for some in kept.values() for outcome in some]
    first = float(np.median([o.ttft or 0.0 for o in every]))
    return Single(seconds, first, every[-1].prompt_tokens or 0)


def validate(
    chosen: Chosen,
    cost: Cost,
    trace: Many[Planned],
    flags: Many[str],
    console: Console,
    noise: Noise | None = None,
    learn: Path | None = None,
) -> Validation:
    """Serve a trace and simulate it, with the host overheads measured before; intervals need the law's noise.

    The file `learn` of a calibration keeps how far the run is from its prediction.
    """
    options = [word for name, value in chosen.options.items() for word in ("--policy-option", f"{name}={value}")]
    flags = [*flags, *options]
    served, single = serve(chosen, flags, trace, console)
    host = fit_host(cost, single, settings(list(map(str, flags))))
    run = served.simulate(cost, host, records=True)
    within = noise.intervals(lambda law: served.simulate(law, host), cost, run) if noise else {}
    found = Validation(chosen.name, host, run, served, within)
    if noise and learn:
        intervals.keep(learn, found.scores(noise))
    return found
