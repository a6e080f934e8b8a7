"""A run of our own server, as its client and /events saw it, which the simulator can serve again.

It must not know who sent the requests, or what is compared.
"""

from __future__ import annotations

import collections.abc as abc
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from client.data import Call
from client.report import programs
from client.report.measure import Outcome
from costs import drafting
from costs.cost import Cost, Host
from costs.steps import Step, step_of_members
from scheduling.iteration import Member
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from scheduling.speculation import MOST
from simulate.best.clairvoyant import KnownHits
from simulate.closed_loop import ClosedLoop
from simulate.logs import steps
from simulate.measured.observed import seen
from simulate.scenario import Chosen, EngineSize
from simulate.simulator import Run, simulate

STEP_TOKENS = 256  # of a server that does not report them
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Served:
    """Complete outcomes in order, with times from the start of the run, steps as /events sends them, and the engine of /stats.

    If the requests are `calls` of programs, a call is sent again when those that it waits for are answered.
    """

    chosen: Chosen
    outcomes: abc.Sequence[Outcome]
    records: abc.Sequence[Record]
    engine: Record
    calls: abc.Sequence[Call] = ()

    def scheduler(self) -> Scheduler:
        """Return a new scheduler with the slots, KV pages, prefix hits and tokens per step of the server."""
        kv = self.engine.get("kv") or {"pages_total": 0, "page_size": 1}
        tokens_per_step = self.engine.get("max_tokens_per_step") or STEP_TOKENS
        engine = EngineSize(
            self.engine["max_batch_size"], tokens_per_step, kv["pages_total"] * kv["page_size"], kv["page_size"]
        )
        scheduler = engine.scheduler(self.chosen)
        scheduler.batch.pages = KnownHits(scheduler.pages, {o.id: o.cached_tokens or 0 for o in self.outcomes})
        return scheduler

    def sequences(self, arrivals: Mapping[str, float] | None = None) -> list[Sequence]:
        """Return the requests, except those with an unknown prompt length or arrival.

        They arrive when the client sent them, or at `arrivals`. As on the server, the scheduler knows the limit of a request,
        which may be the end of the context, and not where the model will end the answer.
        """
        totals = {m["id"]: m["total"] for record in self.records for m in record["members"]}
        result = []
        for number, o in enumerate(self.outcomes):
            total = totals.get(o.id, 0)
            prompt = o.prompt_tokens or (total - o.max_tokens if o.max_tokens else 0)
            at = o.intended if arrivals is None else arrivals.get(o.id)
            if prompt > 0 and o.tokens > 0 and at is not None:
                # Its own prompt, so that it finds the pages of no other request.
                seq = Sequence([number] * prompt, max(o.tokens, total - prompt), id=o.id)
                seq.arrived_at, seq.client, seq.open_ended = at, o.user, not o.max_tokens
                seq.end_after(o.tokens)
                seq.answer_tokens = 0  # an oracle does not know it either
                result.append(seq)
        if not self.calls:
            return result
        for seq, call in zip(result, self.calls, strict=True):
            seq.arrived_at, seq.program, seq.session, seq.keep_s = call.at, call.program, call.session, call.keep_s
        return ClosedLoop(result, self.calls)

    def fresh(self) -> tuple[Scheduler, list[Sequence]]:
        """Return what a simulation begins with."""
        return self.scheduler(), self.sequences()

    def simulate(self, law: Cost, host: Host, arrivals: Mapping[str, float] | None = None, **options: bool) -> Run:
        """Simulate the run, with the draft tokens that it had; `options` are those of `simulate`."""
        scheduler = self.scheduler()
        scheduler.speculator = drafting.replaying(self.records, MOST)
        return simulate(scheduler, self.sequences(arrivals), law, host, **options)

    def clocked(self) -> dict[str, tuple[float, float, float]]:
        """Return arrival, first token and end of each request by the server's clock, as far as it reports them."""
        rows = {row["id"]: row for row in steps.requests(self.records)}
        # A batch may be held to its end, which is then that of its requests.
        ends = {m["id"]: record["t"] + record["seconds"] for record in self.records for m in record["members"]}
        known = [(o.id, o.queue, rows[o.id]) for o in self.outcomes if o.queue is not None and o.id in rows]
        return {id: (row["sent"] - queue, row["first"], ends[id]) for id, queue, row in known}

    def host(self, law: Cost | None = None) -> Host:
        """Return what the client waits beside the steps, and, with a law, what a step takes beyond it.

        With a law it includes the time in which an idle loop wakes, which a prediction does not know. These are medians,
        none below 0; without a stream the time before the scheduler sees a request is half of it.
        """
        clocked, lasted, late = self.clocked(), lasting(self.records), []
        began = {id: at for id, (at, _, _) in clocked.items()}
        if law:
            spans = ((record["t"], record["t"] + seconds) for record, seconds in zip(self.records, lasted))
            began = dict(zip(began, seen(began.values(), spans)))
            sums = (step_of(record, self.chosen.policy(1).padded) for record in self.records)
            late = [seconds - law.seconds(step) for step, seconds in zip(sums, lasted)]
        known = [(o, *clocked[o.id][1:], began[o.id]) for o in self.outcomes if o.id in clocked]
        alpha = _median([o.latency - (last - at) for o, _, last, at in known])
        before = [o.ttft - (first - at) for o, first, _, at in known if o.ttft is not None]
        alpha0 = min(alpha, _median(before)) if before else alpha / 2
        return Host(alpha0=alpha0, alpha1=alpha - alpha0, sigma=_median(late))

    def late(self, host: Host) -> float:
        """Return by how much a request that comes while one row decodes delays itself and the step, beyond `host`."""
        came = np.array([at for at, _, _ in self.clocked().values()])
        alike = [r for r in self.records if [m["phase"] for m in r["members"]] == ["decode"]]
        spans = ((r["t"], r["t"] + r["seconds"]) for r in alike)
        met = np.array([bool(np.any((begin < came) & (came < end))) for begin, end in spans], bool)
        spent = np.array([r["seconds"] for r in alike])
        shared = float(np.median(spent[met]) - np.median(spent[~met])) if 0 < met.sum() < len(met) else 0.0
        return max(0.0, self.host().alpha0 - host.alpha0) + max(0.0, shared)


def program_seconds(outcomes: abc.Sequence[Outcome], calls: abc.Sequence[Call]) -> np.ndarray:
    """Return what each program took, all of whose calls were answered."""
    sizes = Counter(call.program for call in calls)
    _, each = programs.of(outcomes, {name: (count, None) for name, count in sizes.items()})
    return np.array([one["took_s"] for one in each])


def _median(seconds: abc.Sequence[float]) -> float:
    return max(0.0, float(np.median(seconds or [0.0])))


def step_of(record: Record, padded: bool) -> Step:
    """Sum a step that a server reported."""
    members = (Member(m["id"], 0, m["phase"], m["tokens"], m["computed"], 0) for m in record["members"])
    return step_of_members(members, padded)


def lasting(records: abc.Sequence[Record]) -> list[float]:
    """Return the seconds of each step, with the pause before the next one where its requests go on."""
    return [
        after["t"] - record["t"]
        if after is not None and after["n"] == record["n"] + 1 and _goes_on(record)
        else record["seconds"]
        for record, after in zip(records, [*records[1:], None])
    ]


def _goes_on(record: Record) -> bool:
    return len(record["left"]) < len(record["members"])
