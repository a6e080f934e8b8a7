"""The decisions of a policy, one kind at a time, made with knowledge of the future: what each costs a run on its requests.

Each replay serves the same requests with the same law, and changes one kind of decision:

* order: whenever the policy lets requests join, those join that take the least time alone. How many, when, and who leaves
  or is preempted is still up to the policy.
* admission: requests join in the order in which they joined, but before any step, as soon as a slot and the pages of the whole
  answer are free, and leave with the last token, unpadded. The best of all slots, half and a quarter of them counts.
* cache: each prompt finds all pages that it shares with a request that arrived before it, whatever was evicted meanwhile.

Knowing the future never hurts, since one may still decide as the policy did: no part is negative. But the parts do not add
up to the regret: what two decisions cost together counts in both or in neither, and preemption, chunks of prompts and the
bound's own gap count in none. The rest, which may be negative, is "other". This module must not know bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from costs.cost import Cost, Host
from costs.steps import decoding, prefilling
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.reservations import Reservations
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.simulator import Run, simulate

MOST_REQUESTS = 1000  # of a run that is replayed
Again = Callable[[], tuple[Scheduler, list[Sequence]]]


class KnownHits(Reservations):
    """Pages in which each prompt finds a known number of tokens: `hits` by request id.

    Only a preempted request finds more: itself, as far as its pages were not needed.
    """

    def __init__(self, pool: PagePool | None, hits: Mapping[str, int]) -> None:
        super().__init__(pool)
        self.hits = hits

    def reserve(self, seq: Sequence, tokens: int) -> bool:
        if not super().reserve(seq, tokens):
            return False
        if not seq.preemptions:
            seq.computed = seq.cached = min(self.hits.get(seq.id, 0), len(seq.prompt_ids) - 1)
        return True


def parts(run: Run, cost: Cost, again: Again) -> dict[str, float]:
    """Return by how many seconds of mean latency each replay beats the run; `again` makes a fresh scheduler and requests."""
    own = float(run.latency.mean())

    def gained(replays: Iterator[tuple[Scheduler, list[Sequence]]]) -> float:
        least = own
        for scheduler, sequences in replays:
            try:
                replay = simulate(scheduler, sequences, cost, run.host)
            except Exception:  # the hooks of a user's policy may rely on each other
                continue
            if replay.answered == run.answered:
                least = min(least, float(replay.latency.mean()))
        return own - least

    kinds = {"order": _ordered(run, cost, again), "admission": _admitted(run, again), "cache": _cached(run, again)}
    return {name: gained(replays) for name, replays in kinds.items()}


def _ordered(run: Run, cost: Cost, again: Again) -> Iterator[tuple[Scheduler, list[Sequence]]]:
    scheduler, sequences = again()
    policy = scheduler.policy
    alone = {seq.id: seconds_alone(seq, cost, run.host) for seq in run.sequences}
    # Hooks are looked up in the class, and a policy keeps what its constructor noted, so its class is changed.
    policy.__class__ = _changed(policy, order=_ascending(alone))
    scheduler.switch(policy, 0.0)
    yield scheduler, sequences


def _admitted(run: Run, again: Again) -> Iterator[tuple[Scheduler, list[Sequence]]]:
    joined = _ascending({seq.id: seq.scheduled_at or 0.0 for seq in run.sequences})
    totals = {seq.id: seq.length for seq in run.sequences}
    slots = again()[0].policy.slots
    for most in dict.fromkeys(max(1, slots // part) for part in (1, 2, 4)):
        scheduler, sequences = again()
        plain = Policy(most)
        plain.__class__ = _changed(plain, order=joined, reserve_tokens=lambda self, seq: totals[seq.id])
        scheduler.switch(plain, 0.0)
        yield scheduler, sequences


def _cached(run: Run, again: Again) -> Iterator[tuple[Scheduler, list[Sequence]]]:
    scheduler, sequences = again()
    pool = scheduler.pages
    if pool is None or not pool.prefix_cache:
        return
    seen: set[bytes] = set()
    hits = {}
    for seq in run.sequences:
        known = next((i for i, key in enumerate(seq.hashes) if key not in seen), len(seq.hashes))
        hits[seq.id] = known * pool.page_size
        seen.update(seq.hashes)
    scheduler.batch.pages = KnownHits(pool, hits)
    yield scheduler, sequences


def _ascending(values: Mapping[str, float]) -> Callable[..., list[Sequence]]:
    """Return a hook `order` that sorts requests by a value of each."""
    return lambda self, waiting, now: sorted(waiting, key=lambda seq: values[seq.id])


def _changed(policy: Policy, **hooks: Any) -> type[Policy]:
    """Return the class of a policy with other hooks."""
    return type("Clairvoyant", (type(policy),), {"__module__": type(policy).__module__, **hooks})


def seconds_alone(seq: Sequence, cost: Cost, host: Host) -> float:
    """Return how long the steps of an answered request take when it runs alone, its prompt in one."""
    prompt, decodes = len(seq.prompt_ids), max(0, len(seq.output_ids) - 1)
    middle = prompt + (decodes + 1) // 2
    return cost.seconds(prefilling(prompt)) + decodes * cost.seconds(decoding(1, middle, middle)) + decodes * host.sigma
