"""The runs of a comparison: the same seeded plans for each server, warm-up, records, figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from terminal.console import FINE, SOME_FAILED, UNREACHABLE, say
from terminal.options import UsageError, Values

from . import runs
from .report import conversations, measure, tables
from .report.store import Store, slug
from .send.events import EventRecorder
from .send.target import ServerUnreachable, Target, check_chat, fetch_stats
from .workloads import catalog, corpus
from .workloads.arrivals import Arrivals

DEFAULT_WARMUP = 3


@dataclass(slots=True)
class Load:
    """A load of the comparison, with one plan for each repeat, the same for every server."""

    name: str
    arrivals: Arrivals
    plans: list[catalog.Plan]
    workload: str


def draw(flags: Values, seed: int, count: int, workload: str) -> list[Load]:
    """Draw all plans from the seed, for the context of --context; each repeat adds 1 to it."""
    context = flags.context or corpus.USUAL_CONTEXT
    text = corpus.load(Path(flags.text) if flags.text else None)
    loads = []
    try:
        for pace in flags.load:
            plans = [catalog.draw(workload, count, pace, seed + i, text, context) for i in range(flags.repeats)]
            loads.append(Load(pace.text, pace, plans, workload))
    except ValueError as error:
        raise UsageError(str(error)) from error
    return loads


@dataclass(slots=True)
class Experiment:
    """Sends the plans to each server and writes the results."""

    store: Store
    console: Console
    flags: Values
    seed: int
    failed: int = 0
    missing: int = 0
    interrupted: bool = False

    def write_plans(self, loads: Sequence[Load]) -> None:
        """Write all plans."""
        for load in loads:
            for repeat, plan in enumerate(load.plans):
                self.store.arrivals(load.name, repeat, plan.planned)

    def each(self, words: Sequence[str], run: Callable[[str, str], None]) -> None:
        """Call `run` for each policy or server, until Ctrl-C; one that cannot be started or reached is left out."""
        for i, word in enumerate(words, 1):
            try:
                run(word, f"[{i}/{len(words)}] ")
            except ServerUnreachable as error:
                self.missing += 1
                self.store.warn(f"{word}: cannot start or reach the server: {error}")
                remedy = "Start it" if "://" in word else f"Run ./server.sh {word} to see why"
                say(self.console, f"error: {word}: {error}. {remedy}, or leave it out")
            if self.interrupted:
                self.store.warn("stopped early by Ctrl-C")
                break

    def exit_code(self) -> int:
        if self.missing and not self.store.summary["runs"]:
            return UNREACHABLE
        return SOME_FAILED if self.missing or self.failed or self.interrupted else FINE

    def run_loads(self, name: str, target: Target, loads: Sequence[Load], progress: str) -> None:
        """Send every load to a server; raise ServerUnreachable if it does not answer."""
        fetch_stats(target)
        if catalog.is_chat(loads[0].workload):
            check_chat(target, loads[0].workload)
        events = EventRecorder(target, self.store.iterations)
        events.start()
        try:
            count = self.flags.warmup if self.flags.warmup is not None else DEFAULT_WARMUP
            warmup = runs.warm_up(target, loads[0].plans[0].planned, count)
            if not events.is_connected():
                say(self.console, f"note: {name} has no /events, so there are no plots of its slots")
            events.settle()  # the steps of the warm-up are not recorded
            for load in loads:
                for repeat, plan in enumerate(load.plans):
                    labels = {"policy": name, "load": load.name, "repeat": repeat}
                    again = f" #{repeat + 1}" if len(load.plans) > 1 else ""
                    say(
                        self.console,
                        f"{progress}{name}, {plan.arrivals.describe()}{again}: {len(plan.planned)} requests",
                    )
                    self.one(labels, target, plan, warmup, events)
                    if self.interrupted:
                        return
        finally:
            events.close()

    def one(
        self,
        labels: dict[str, Any],
        target: Target,
        plan: catalog.Plan,
        warmup: int,
        events: EventRecorder | None = None,
    ) -> dict[str, Any]:
        """Run one plan and write its figures."""
        before = runs.stats_or_none(target)
        if events is not None:
            events.label(labels)
        seed, load = self.seed + labels["repeat"], slug(labels["load"]).replace("+", "-")
        target = replace(target, run=f"{load}.{seed}")
        sent = runs.send(target, plan.planned, self.console, plan.arrivals, self.store.record(labels))
        if events is not None:
            events.settle()
            events.label(None)
        numbers = conversations.result(sent.outcomes, self.facts(labels, target, plan, before, warmup, sent.stalls))
        self.store.add(labels, numbers)
        for text in tables.warnings_of(numbers, sent.outcomes):
            self.store.warn(f"{labels['policy']}, {labels['load']}: {text}")
            if text not in tables.lateness(numbers):  # said once, at the end of the comparison
                say(self.console, f"warning: {text}")
        self.failed += numbers["failed"] + numbers["unsent"]
        self.interrupted |= sent.interrupted
        return numbers

    def facts(
        self,
        labels: dict[str, Any],
        target: Target,
        plan: catalog.Plan,
        before: dict[str, Any] | None,
        warmup: int,
        stalls: list[float],
    ) -> measure.RunFacts:
        """Return the facts of a run's result besides its figures."""
        config = {
            "workload": self.store.summary.get("workload"), "load": labels["load"],
            "numsamples": len(plan.planned), "api": target.dialect.api,
            "stream": target.dialect.stream, "notes": plan.notes,
        }  # fmt: skip
        return runs.facts(
            target, plan.planned, plan.arrivals, self.seed + labels["repeat"], config, before,
            runs.stats_or_none(target), slos=dict(self.flags.goodput), warmup=warmup, stalls=stalls,
        )  # fmt: skip
