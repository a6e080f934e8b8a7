"""A run of our own server, as its client and /events saw it, which the simulator can serve again.

It must not know who sent the requests, or what is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

from client.report.measure import Outcome
from costs import drafting
from costs.cost import Cost, Host
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from scheduling.speculation import MOST
from simulate.best.clairvoyant import KnownHits
from simulate.scenario import Chosen, Engine
from simulate.simulator import Run, simulate

STEP_TOKENS = 256  # of a server that does not report them
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Served:
    """Complete outcomes in order, with times from the start of the run, steps as /events sends them, and the engine of /stats."""

    chosen: Chosen
    outcomes: Many[Outcome]
    records: Many[Record]
    engine: Record

    def scheduler(self) -> Scheduler:
        """Return a new scheduler with the slots, KV pages, prefix hits and tokens per step of the server."""
        kv = self.engine.get("kv") or {"pages_total": 0, "page_size": 1}
        tokens_per_step = self.engine.get("max_tokens_per_step") or STEP_TOKENS
        engine = Engine(
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
        return result

    def fresh(self) -> tuple[Scheduler, list[Sequence]]:
        """Return what a simulation begins with."""
        return self.scheduler(), self.sequences()

    def simulate(self, law: Cost, host: Host, arrivals: Mapping[str, float] | None = None, **options: bool) -> Run:
        """Simulate the run, with the draft tokens that it had; `options` are those of `simulate`."""
        scheduler = self.scheduler()
        scheduler.speculator = drafting.replaying(self.records, str(MOST))
        return simulate(scheduler, self.sequences(arrivals), law, host, **options)
