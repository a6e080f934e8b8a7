"""A fleet of two pools: one computes prompts, the other the tokens after the first.

The keys and values of a prompt are sent from one to the other, each prefill replica sending one prompt at a time. They
must find pages there like any request that joins. One that is preempted there computes its prompt again where it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from costs.cost import Cost, Host, Transfer
from routing.routers import Router
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.fleet.fleet import Fleet, Pool
from simulate.fleet.replica import Replica


class ImportingPool(PagePool):
    """The pages of a decode replica: the prompt of a request that joins for the first time is in them."""

    def reserve(self, hashes: list[bytes], tokens: int, prompt_tokens: int = 0) -> tuple[list[int], int] | None:
        reserved = super().reserve([], tokens)
        return None if reserved is None else (reserved[0], prompt_tokens)


class Disaggregated(Fleet):
    """Requests arrive at `prefill`; `route` sends them on to `decode`, whose pages are an ImportingPool or unlimited."""

    def __init__(
        self, prefill: Iterable[Scheduler], decode: Iterable[Scheduler], route: Router, transfer: Transfer, cost: Cost,
        host: Host | None = None, *, gaps: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(prefill, cost, host, gaps=gaps)
        self._decode = Pool()
        self._route = route
        self._transfer = transfer
        self._wanted: dict[Sequence, int] = {}  # the tokens that a request wants, while its prompt is computed
        self._cached: dict[Sequence, int] = {}  # the prompt tokens that a request found in a cache, while it decodes
        self._free_at = [0.0] * len(self.replicas)  # when a prefill replica has sent all that it had to send
        for scheduler in decode:
            self._decode.join(self.start(scheduler, 0.0))

    def _pool_of(self, replica: Replica) -> Pool:
        return self.pool if replica.number < len(self._free_at) else self._decode

    def admit(self, pool: Pool, replica: Replica, seq: Sequence) -> None:
        # The step that ends a prompt yields the first token, so that is all that a prefill replica computes.
        if pool is self.pool:
            self._wanted[seq] = seq.max_tokens
            seq.max_tokens = min(1, seq.max_tokens)
        super().admit(pool, replica, seq)

    def answer(self, replica: Replica, seq: Sequence) -> None:
        """Send the prompt of a request that wants more tokens to the other pool."""
        if self._pool_of(replica) is self._decode:
            seq.cached = self._cached.pop(seq)
            super().answer(replica, seq)
            return
        wanted, now = self._wanted.pop(seq), self.result.ended
        if wanted <= 1 or seq.finish_reason != "length":
            super().answer(replica, seq)
            return
        begins = max(now, self._free_at[replica.number])
        self._free_at[replica.number] = begins + self._transfer.seconds(len(seq.prompt_ids))
        self.call(self._free_at[replica.number], lambda at: self._go_on(seq, wanted, at))

    def _go_on(self, first: Sequence, wanted: int, now: float) -> None:
        """Let the other pool compute the tokens after the first."""
        seq = Sequence(
            first.prompt_ids, wanted, id=first.id, arrived_at=now, client=first.client, priority=first.priority,
            deadline=first.deadline, output_ids=first.output_ids[:], computed=len(first.prompt_ids), hashes=first.hashes,
            scheduled_at=first.scheduled_at, first_token_at=first.first_token_at, last_token_at=first.last_token_at,
            constrained=first.constrained,
        )  # fmt: skip
        seq.end_after(first.answer_tokens)
        self._numbers[seq] = self._numbers.pop(first)
        self._cached[seq] = first.cached
        self.admit(self._decode, self._decode.choose(self._route, seq, now), seq)
