"""One measured run: draw its plan, send it, and compute its result."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from rich.console import Console

from terminal.console import say
from terminal.options import UsageError, Values
from terminal.shell import open_files

from . import data
from .display import Display
from .report import conversations, figures
from .report.measure import Outcome
from .send.load import Failed, LoadRun, raise_for, send_all
from .send.target import KeyRefused, ServerUnreachable, Target, fetch_stats
from .workloads import catalog, corpus, programs
from .workloads.arrivals import Arrivals

GRACE_SECONDS = 10.0  # for open requests after the first Ctrl-C
SPARE_FILES = 128
WARMUP_TOKENS = 8
ALONE = 6  # requests whose times alone are measured before a run of programs


class Pace(NamedTuple):
    """The seconds of a request on an empty server: before its first token, more for each prompt token, and for each further one."""

    first: float
    prompt: float
    token: float

    def alone(self, call: data.Call) -> float:
        """Return what a call takes alone, if the conversation that it goes on with is cached."""
        return self.first + self.prompt * call.fresh + self.token * (call.answer - 1)


@dataclass(frozen=True, slots=True)
class Sent:
    """The outcomes of a plan, how long the client stalled, and whether the user stopped it."""

    outcomes: list[Outcome]
    stalls: list[float]
    interrupted: bool


def draw(flags: Values, workload: str, count: int | None, pace: Arrivals, seed: int, context: int) -> catalog.Plan:
    """Draw the requests of a run; --context replaces `context`, and UsageError says why they cannot be drawn."""
    try:
        text = corpus.load(Path(flags.text) if flags.text else None)
        return catalog.draw(workload, count, pace, seed, text, flags.context or context)
    except ValueError as error:
        raise UsageError(str(error)) from error


def measure(
    target: Target,
    plan: catalog.Plan,
    config: Mapping[str, Any],
    flags: Values,
    warmup: int,
    console: Console,
    on_outcome: Callable[[Outcome], None],
    settle: Callable[[], None] = lambda: None,
    pace: Pace | None = None,
) -> tuple[dict[str, Any], Sent]:
    """Send a plan; return its result object, and the outcomes.

    `warmup` is how many requests were sent before. `settle` returns when the server has recorded the last steps. Without a
    `pace`, the slowdowns of programs are unknown.
    """
    before = stats_or_none(target)
    sent = send(target, plan.planned, console, plan.arrivals, on_outcome)
    settle()
    api = target.dialect.api
    numbers = conversations.result(
        sent.outcomes,
        _programs(plan.planned, pace),
        slos=dict(flags.goodput),
        stalls=sent.stalls,
        date=datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        backend="effective-batching" if api == "inference" else api,
        model_id=target.dialect.model,
        num_prompts=len(plan.planned),
        request_rate=plan.arrivals.rate,
        burstiness=plan.arrivals.burstiness,
        max_concurrency=plan.arrivals.users,
        warmup_requests=warmup,
        seed=plan.seed,
        trace_sha256=data.trace_sha256(plan.planned),
        config=config,
        machine=machine(),
        versions=versions(),
        server_before=before,
        server_after=stats_or_none(target),
    )
    return numbers, sent


def send(
    target: Target,
    trace: Sequence[data.Planned],
    console: Console,
    arrivals: Arrivals | None = None,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> Sent:
    """Run a trace to its end, or until shortly after the first Ctrl-C."""
    closed = arrivals is not None and arrivals.users is not None
    think = arrivals.second if arrivals and closed else 0.0
    run = LoadRun(target, trace, arrivals.users if arrivals else None, think, on_outcome)
    interrupted = False
    try:
        with Display(run, console, 0.0 if closed else trace[-1].at):
            try:
                run.start()
                run.wait()
            except KeyboardInterrupt:
                interrupted = True
                run.stop()
                say(
                    console,
                    f"stopped sending; open requests have {GRACE_SECONDS:.0f} s to finish. "
                    "Press Ctrl-C again to exit at once",
                )
                run.wait(GRACE_SECONDS)
        return Sent(run.outcomes(), run.stalls, interrupted)
    finally:  # also where SIGTERM ends the command: `on_outcome` may write to a file that its caller closes
        run.close()


def warm_up(target: Target, trace: Sequence[data.Planned], count: int) -> int:
    """Send `count` short requests one by one, unmeasured; return how many were answered."""
    chosen = itertools.islice(itertools.cycle(trace), count)
    # Their words in another order (and not that of `pace_of`): no prompt of the run finds its pages in the cache.
    texts = [(" ".join(sorted(p.prompt.split())), p.chat and data.Chat(capped=True)) for p in chosen]
    short = [data.Planned(i, 0.0, text, WARMUP_TOKENS, chat=chat) for i, (text, chat) in enumerate(texts)]
    answered = 0
    for outcome in send_all(target, short):
        with contextlib.suppress(Failed):
            raise_for(outcome, target)
            answered += 1
    return answered


def pace_of(target: Target, trace: Sequence[data.Planned]) -> Pace | None:
    """Time some calls of programs one by one, which are not measured; None without programs, or without streams."""
    calls = sorted((p for p in trace if p.program), key=lambda p: len(p.prompt))
    if not calls:
        return None
    # Their words in reverse: no prompt finds or leaves pages that those of the run have. The first warms up.
    texts = [p.prompt.split()[::-1] for p in [calls[0], *calls[:: -(-len(calls) // ALONE)]]]
    short = [data.Planned(i, 0.0, " ".join(t), WARMUP_TOKENS, chat=calls[0].chat) for i, t in enumerate(texts)]
    timed = [(len(texts[o.index]), o.ttft, o.tpot) for o in send_all(target, short) if o.index and not o.error]
    known = [(words, ttft, tpot) for words, ttft, tpot in timed if ttft is not None and tpot is not None]
    if not known:
        return None
    words, ttfts, tpots = zip(*known)
    slope = max(0.0, (figures.fit(words, ttfts) or (0.0,))[0])
    first = np.median([ttft - slope * count for count, ttft, _ in known])
    return Pace(max(0.0, float(first)), slope, float(np.median(tpots)))


def _programs(trace: Sequence[data.Planned], pace: Pace | None) -> dict[str, tuple[int, float | None]]:
    """Return the number of calls of each program, and the seconds of its longest path alone."""
    calls = [p.call for p in trace if p.call and p.program]
    longest = programs.longest_paths(calls, [pace.alone(call) for call in calls]) if pace else {}
    return {name: (count, longest.get(name)) for name, count in Counter(call.program for call in calls).items()}


def stats_or_none(target: Target) -> dict[str, Any] | None:
    """Fetch `/stats`; return None if the server does not answer."""
    try:
        return fetch_stats(target)
    except (ServerUnreachable, KeyRefused):
        return None


def machine() -> dict[str, Any]:
    """Describe this machine, without user names or paths."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        name = next(x.partition(":")[2].strip() for x in lines if x.startswith("model name"))
    return {"platform": platform.platform(), "processor": name, "cpus": os.cpu_count()}


def versions() -> dict[str, str]:
    """Return the versions on which a measured time may depend."""
    return {"python": platform.python_version(), "numpy": np.__version__, "aiohttp": aiohttp.__version__}


def allow_files(connections: int, at_once: bool) -> None:
    """Raise the open-file limit for this many connections; raise UsageError for a burst that exceeds it."""
    need = connections + SPARE_FILES
    limit = open_files(need)
    if at_once and limit < need:
        raise UsageError(
            f"the open-file limit is {limit:,}, but {connections:,} connections need {need:,}. "
            f"Run 'ulimit -n {need}' or lower --numsamples"
        )
