"""A run of the simulator as one value: the policies, the engine, what a step costs, and the requests.

It must not know command lines: `simulate/commands/inputs.py` makes a scenario from the options and checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Generic, Protocol, TypeVar

import policies
from costs.cost import Cost, Host
from scheduling.hooks import reserve_as_answers_grow
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from scheduling.speculation import Speculator
from simulate.fleet.instances import serve, together
from simulate.simulator import Run


@dataclass(frozen=True)
class Chosen:
    """A policy by its name, with its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def policy(self, slots: int) -> Policy:
        """Return a new policy for so many slots."""
        return policies.get_policy(self.name, slots, self.options)


class Inside(Chosen):
    """A policy inside vLLM, which pads no rows and preempts requests when pages run out."""

    def policy(self, slots: int) -> Policy:
        policy = reserve_as_answers_grow(super().policy(slots))
        policy.padded = False
        return policy


@dataclass(frozen=True)
class EngineSize:
    """What serves the requests.

    Without `kv_tokens` memory is unlimited. `speculator` makes what proposes draft tokens. `engines` are the slots of each of several engines, with unlimited memory, that serve one queue; `slots` are
    the most of one.
    """

    slots: int
    tokens_per_step: int = 2048
    kv_tokens: int = 0
    page_size: int = 16
    prefix_cache: bool = True
    evict: str = "lru"
    speculator: Callable[[], Speculator | None] = lambda: None
    engines: tuple[int, ...] = ()

    def scheduler(self, chosen: Chosen, pool: type[PagePool] = PagePool) -> Scheduler:
        """Return a new scheduler with a new policy, the first of several on its queue; `pool` keeps its pages."""
        pages = None
        if self.kv_tokens:
            evict = policies.get_eviction(self.evict)
            count = self.kv_tokens // self.page_size + 1  # page 0 is for padding
            pages = pool(count, self.page_size, prefix_cache=self.prefix_cache, evict=evict)
        policy, speculator = chosen.policy(self.slots), self.speculator()
        if self.engines:
            ends = [*accumulate(self.engines)]
            ranges = [range(end - slots, end) for end, slots in zip(ends, self.engines)]
            return together(Scheduler(policy, None, self.tokens_per_step, slots=slots) for slots in ranges)
        return Scheduler(policy, pages, self.tokens_per_step, speculator=speculator)


class Requests(Protocol):
    """Requests that can be served again and again."""

    def sequences(self) -> list[Sequence]:
        """Return fresh sequences."""
        ...


R = TypeVar("R", bound=Requests)


@dataclass(frozen=True)
class Scenario(Generic[R]):
    """The policies serve the same requests, each alone on an engine of its own.

    `asked` are instances of the policies, only to be asked what they do: a run needs a fresh one.
    """

    policies: tuple[Chosen, ...]
    engine: EngineSize
    cost: Cost
    host: Host
    rows: R
    asked: tuple[Policy, ...] = ()

    def fresh(self, chosen: Chosen) -> tuple[Scheduler, list[Sequence]]:
        """Return a new scheduler of a policy, and fresh requests, which an eviction that knows the future has seen."""
        scheduler, sequences = self.engine.scheduler(chosen), self.rows.sequences()
        if scheduler.pages is not None and scheduler.pages.evict.clairvoyant:
            for seq in sequences:
                scheduler.batch.pages.hash(seq)
            scheduler.pages.evict.foresee(sequences)
        return scheduler, sequences

    def serve(self, chosen: Chosen, *, records: bool = False) -> Run:
        """Serve the requests with one policy; with `records`, keep the Iteration of each step."""
        return serve(*self.fresh(chosen), self.cost, self.host, records=records)
