"""The runs of a comparison or a sweep: servers to reach, the plans sent to each, and the folder of the results."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from terminal.console import FINE, SOME_FAILED, UNREACHABLE, say
from terminal.options import UsageError, Values
from terminal.progress import duration

from . import runs
from .flags import base_url, is_address
from .report import tables
from .report.store import Store, slug
from .send import servers
from .send.dialects import Dialect
from .send.events import EventRecorder
from .send.target import ServerUnreachable, Target, check_chat, fetch_stats, known
from .workloads import catalog

DEFAULT_WARMUP = 3


def server_of(word: str) -> tuple[str, str] | None:
    """Return name and URL of NAME=URL, or of an address; None for a policy, whose flags follow a space, or a file."""
    if is_address(word):
        return urlsplit(base_url(word)).netloc, base_url(word)
    name, _, url = word.partition("=")
    return (name, base_url(url)) if is_address(url) and " " not in name else None


def name_of(word: str) -> str:
    """Return the name of a policy or of a server."""
    server = server_of(word)
    return server[0] if server else word


def complete(flags: Values, usual: Sequence[str]) -> None:
    """Add the server at --port to what is compared, or the usual policies to nothing; UsageError for a name that is there twice."""
    if flags.port:
        flags.what.append(f"localhost:{flags.port}")
    flags.what = flags.what or list(usual)
    if len(set(map(name_of, flags.what))) < len(flags.what):
        raise UsageError(f"{' '.join(flags.what)} has the same name twice. Use NAME=URL, or each policy once")


def without_key(name: str, arguments: Sequence[str]) -> str:
    """Return the command without its key, for the page."""
    pairs = pairwise(["", *arguments])
    shown = ["KEY" if before == "--api-key" else re.sub("^(--api-key=).*", r"\1KEY", word) for before, word in pairs]
    return shlex.join(["./eb", name, *shown])


def server_flags(flags: Values) -> list[str]:
    """Return the flags of the servers to start."""
    # Without draft tokens, which some policies cannot have: a comparison of loops should show the effect of batching.
    return ["--model", flags.model, "--load-format", flags.load_format, "--speculate", "off", *flags.server]


class Experiment:
    """Sends plans to each server and writes the results to a new folder."""

    def __init__(self, flags: Values, console: Console, command: str) -> None:
        self.flags = flags
        self.console = console
        servers.check([word, *server_flags(flags)] for word in flags.what if not server_of(word))
        self.store = new_store(flags, command)
        self.failed = self.missing = 0
        self.interrupted = False
        self._pace: runs.Pace | None = None
        self._took: dict[str, float] = {}  # seconds of the last run of each load
        self._later = 0  # servers that get the same loads after this one

    def each(self, run: Callable[[str, Target, str], None], what: Sequence[str]) -> None:
        """Call `run` with each policy or server, its target and the progress, until Ctrl-C; leave out what cannot be reached."""
        for i, word in enumerate(what, 1):
            self._later = len(what) - i
            try:
                with self.reached(word) as target:
                    run(name_of(word), target, f"[{i}/{len(what)}] ")
            except ServerUnreachable as error:
                self.missing += 1
                self.store.warn(f"{word}: {error}")
                why = f". Run ./server.sh {word} to see why" if isinstance(error, servers.ServerFailed) else ""
                say(self.console, f"error: {word}: {error}{why}, or leave it out")
            if self.interrupted:
                self.store.warn("stopped early by Ctrl-C")
                break

    @contextlib.contextmanager
    def reached(self, word: str) -> Iterator[Target]:
        """Yield the target of a running server, or of one that is started for the block."""
        flags = self.flags
        with contextlib.ExitStack() as stack:
            if server := server_of(word):
                url = server[1]
            else:
                log = self.store.folder / f"server-{slug(word)}.log"
                url, _ = stack.enter_context(servers.started(word, server_flags(flags), log, flags.api_key))
            dialect = Dialect(flags.api, flags.stream, temperature=flags.temperature)
            target = Target(url, flags.timeout, api_key=flags.api_key, dialect=dialect)
            yield known(target) if flags.api == "openai" or catalog.is_chat(flags.workload) else target

    def run_loads(self, loads: Sequence[Sequence[catalog.Plan]], name: str, target: Target, progress: str) -> None:
        """Send every load, with its repeats, to a server; raise ServerUnreachable if it does not answer."""
        fetch_stats(target)
        if catalog.is_chat(self.flags.workload):
            check_chat(target, self.flags.workload)
        events = EventRecorder(target, self.store.iterations)
        events.start()
        try:
            warmup = self.warm_up(target, loads[0][0])
            if not events.is_connected():
                say(self.console, f"note: {name} has no /events, so there are no plots of its slots")
            events.settle()  # the steps of the warm-up are not recorded
            every = [(plan, repeat) for plans in loads for repeat, plan in enumerate(plans)]
            for place, (plan, repeat) in enumerate(every):
                labels = {"policy": name, "load": plan.arrivals.text, "repeat": repeat}
                again = f" #{repeat + 1}" if len(loads[0]) > 1 else ""
                left = self.seconds([plan for plan, _ in every[place:] + every * self._later])
                text = f"{progress}{name}, {plan.arrivals.text}{again}: {len(plan.planned)} requests"
                say(self.console, f"{text}; these loads end in about {duration(left)}" if self._took else text)
                events.label(labels)
                self.one(labels, target, plan, warmup, events.settle)
                events.label(None)
                if self.interrupted:
                    return
        finally:
            events.close()

    def seconds(self, plans: Sequence[catalog.Plan]) -> float:
        """Return how long runs take: as long as the last one of their load, or until their last arrival at least."""
        return sum(self._took.get(plan.arrivals.text, plan.planned[-1].at) for plan in plans)

    def warm_up(self, target: Target, plan: catalog.Plan) -> int:
        """Send the first requests, unmeasured; return how many were answered."""
        count = DEFAULT_WARMUP if self.flags.warmup is None else self.flags.warmup
        self._pace = runs.pace_of(target, plan.planned)
        return runs.warm_up(target, plan.planned, count)

    def one(
        self,
        labels: dict[str, Any],
        target: Target,
        plan: catalog.Plan,
        warmup: int,
        settle: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Run one plan and write its figures."""
        load = slug(labels["load"]).replace("+", "-")
        # The same ids on every server, so that a request can be followed through all of them.
        target = replace(target, run=f"{load}.{plan.seed}")
        config = {
            "workload": self.store.summary.get("workload"), "load": labels["load"],
            "numsamples": len(plan.planned), "api": target.dialect.api,
            "stream": target.dialect.stream, "notes": plan.notes,
        }  # fmt: skip
        record = self.store.record(labels)
        numbers, sent = runs.measure(target, plan, config, self.flags, warmup, self.console, record, settle, self._pace)
        self._took[plan.arrivals.text] = numbers["duration"] or 0.0
        self.store.add(labels, numbers)
        for text in tables.warnings_of(numbers, sent.outcomes):
            self.store.warn(f"{labels['policy']}, {labels['load']}: {text}")
            if text != tables.lateness([numbers]):  # said once, at the end of the comparison
                say(self.console, f"warning: {text}")
        self.failed += numbers["failed"] + numbers["unsent"]
        self.interrupted |= sent.interrupted
        return numbers

    def exit_code(self) -> int:
        if self.missing and not self.store.summary["runs"]:
            return UNREACHABLE
        return SOME_FAILED if self.missing or self.failed or self.interrupted else FINE


def new_store(flags: Values, command: str) -> Store:
    """Create the folder of the results."""
    now = datetime.now().astimezone()
    names = list(map(name_of, flags.what))
    called = flags.name or "-".join(map(slug, names))[:60]
    folder = flags.out / (flags.name or f"{now:%Y%m%d-%H%M%S}-{called}")
    if (folder / "summary.json").exists():
        raise UsageError(f"{str(folder)!r} already has results. Use another --name")
    head = {
        "name": called, "date": now.isoformat(timespec="seconds"), "command": command, "seed": flags.seed,
        "workload": flags.workload, "loads": [pace.text for pace in flags.load],
        "policies": names, "machine": runs.machine(), "versions": runs.versions(),
    }  # fmt: skip
    try:
        return Store(folder, head)
    except OSError as error:
        raise UsageError(f"cannot write {str(folder)!r}: {error.strerror}. Use another --out folder") from error
