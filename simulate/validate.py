"""The proof of the simulator: the same arrivals through a real server and through the model of it.

A server is started in a process of its own and asked over HTTP. First, one request at a time, of two lengths: what they
take beyond the cost model is the host's part, per request and per step. Then the open loop, whose arrivals and lengths
the simulator serves too. Predicted stands beside measured, and a bound that is passed fails the command.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import policies
from client.data import Planned
from client.send import load
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.costs import Cost, Host
from simulate.predict import room_of
from simulate.simulator import Run, simulate

ROOT = Path(__file__).parents[1]
READY_SECONDS = 300.0
ALONE = (4, 32)  # tokens of the requests that are sent one at a time
TIMES = 5
WORDS = ("the", "king", "of", "this", "house", "is", "not", "a", "man", "who", "will", "go")
MAKESPAN, MEAN = 0.05, 0.10  # bounds of what is promised at a utilization of about 0.7


@dataclass(frozen=True)
class Comparison:
    """One measure, predicted and measured, in seconds; `bound` is relative, None where nothing is promised."""

    name: str
    predicted: float
    measured: float
    bound: float | None = None

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def good(self) -> bool:
        return self.bound is None or abs(self.error) <= self.bound


@contextlib.contextmanager
def server(policy: str, arguments: Rows[str]) -> Iterator[str]:
    """Start a server, wait until it is ready, give its URL, and stop it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(ROOT / "app.py"), policy, "--host", "127.0.0.1"]
    command += ["--port", str(port), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + READY_SECONDS
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(
                    f"the server did not get ready (exit code {process.poll()}), its words are above. Use the "
                    "flags of ./server.sh after --"
                )
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def draw(rate: float, count: int, seed: int, most: int = 128) -> list[Planned]:
    """Draw Poisson arrivals of short prompts and U{1..most} tokens; no two prompts begin alike for long."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count))
    return [
        Planned(
            i,
            float(at),
            " ".join(rng.choice(WORDS, int(rng.integers(4, 40)))),
            int(rng.integers(1, most + 1)),
        )
        for i, at in enumerate(times)
    ]


def send(url: str, trace: Rows[Planned]) -> list[Any]:
    """Send a trace at its times and return the outcomes, in order; RuntimeError when one fails."""
    run = load.LoadRun(load.Target(url), trace)
    run.start()
    run.wait()
    outcomes = sorted(run.outcomes(), key=lambda outcome: outcome.index)
    failed = [outcome for outcome in outcomes if outcome.error]
    if failed:
        raise RuntimeError(
            f"{len(failed)} of {len(outcomes)} requests failed: {failed[0].error} {failed[0].detail}. Lower --rate"
        )
    return outcomes


def alone(cost: Cost, prompt: int, tokens: int) -> float:
    """Return what the cost model says of a request on its own."""
    scheduler = Scheduler(policies.get_policy("nobatch", max_batch_size=1))
    return float(simulate(scheduler, [Sequence([0] * prompt, tokens)], cost).latency[0])


def fit_host(cost: Cost, seconds: dict[int, float], prompt: int) -> Host:
    """Return the overheads per request and per step that explain requests sent one at a time, none below 0."""
    (n0, t0), (n1, t1) = sorted(seconds.items())
    over0, over1 = t0 - alone(cost, prompt, n0), t1 - alone(cost, prompt, n1)
    sigma = max(0.0, (over1 - over0) / (n1 - n0))
    alpha = max(0.0, over0 - n0 * sigma)
    return Host(alpha0=alpha / 2, alpha1=alpha / 2, sigma=sigma)


def measure_alone(url: str) -> tuple[dict[int, float], int]:
    """Send single requests, one after the other; return the median seconds by length, and the prompt's tokens."""
    prompt = "the king of this house"
    seconds: dict[int, list[float]] = {n: [] for n in ALONE}
    for k in range(TIMES + 1):
        for n in ALONE:
            outcome = send(url, [Planned(0, 0.0, f"{WORDS[k]} {prompt}", n)])[0]
            tokens = outcome.prompt_tokens
            if k:  # the first warms up
                seconds[n].append(outcome.latency)
    return {n: float(np.median(s)) for n, s in seconds.items()}, tokens


def predict(
    scheduler: Scheduler, trace: Rows[Planned], prompts: Rows[int], cost: Cost, host: Host
) -> Run:
    """Serve a trace on the virtual clock."""
    sequences = [
        Sequence([0] * prompt, planned.num_tokens, id=str(planned.index), arrived_at=planned.at)
        for planned, prompt in zip(trace, prompts)
    ]
    return simulate(scheduler, sequences, cost, host)


def compare(
    run: Run, outcomes: Rows[Any], bounds: tuple[float, float] = (MAKESPAN, MEAN)
) -> list[Comparison]:
    """Set a simulated run beside the outcomes of a real one."""
    latency = np.array([outcome.latency for outcome in outcomes])
    makespan = max(o.ended for o in outcomes) - min(o.intended for o in outcomes)
    found = [
        Comparison("makespan", run.makespan, makespan, bounds[0]),
        Comparison("mean latency", float(run.latency.mean()), float(latency.mean()), bounds[1]),
        *(
            Comparison(
                f"p{q} latency",
                float(np.percentile(run.latency, q)),
                float(np.percentile(latency, q)),
            )
            for q in (50, 99)
        ),
    ]
    firsts = [getattr(outcome, "first", None) for outcome in outcomes]
    if None not in firsts:
        ttft = np.array([first - o.intended for first, o in zip(firsts, outcomes)])
        found.append(Comparison("mean TTFT", float(run.ttft.mean()), float(ttft.mean())))
    return found


def engine_of(url: str) -> dict[str, Any]:
    """Return what a server's /stats tell of its engine."""
    with urllib.request.urlopen(f"{url}/stats", timeout=30) as answer:
        return dict(json.load(answer)["engine"])


def validate(
    policy: str, cost: Cost, rate: float, count: int, *, slots: int, budget: int, seed: int = 0,
    arguments: Rows[str] = (), host: Host | None = None, options: dict[str, str] | None = None,
) -> tuple[list[Comparison], Host, Run]:  # fmt: skip
    """Run a trace both ways; the host's part is measured first unless it is given.

    The simulated engine has the slots, the tokens a step and the KV pages that the server says it has.
    """
    flags = ["--max-batch-size", str(slots), "--max-tokens-per-step", str(budget), *arguments]
    for name, value in (options or {}).items():
        flags += ["--policy-option", f"{name}={value}"]
    trace = draw(rate, count, seed)
    with server(policy, flags) as url:
        engine = engine_of(url)
        seconds, prompt = measure_alone(url)
        host = host or fit_host(cost, seconds, prompt)
        outcomes = send(url, trace)
    slots = engine["max_batch_size"]
    made = policies.get_policy(policy, max_batch_size=slots, options=options or {})
    prompts = [outcome.prompt_tokens for outcome in outcomes]
    run = predict(Scheduler(made, *room_of(engine)), trace, prompts, cost, host)
    return compare(run, outcomes), host, run


def utilization(run: Run) -> float:
    """Return the share of the time in which the engine computed."""
    return run.busy / run.makespan
