"""Preemption by swapping: the KV pages of a preempted request go to the host's memory and come back (vLLM, SOSP 2023, 4.5).

They leave before the next step and return before the step in which the request joins again, and both steps wait for it, as in
vLLM 0: whole pages x their tokens x bytes per token / bandwidth. Pages that are found in the prefix cache do not return. What
the swap space cannot hold is recomputed, as without it.
"""

from __future__ import annotations

from costs.cost import Transfer
from scheduling.pages import PagePool, in_whole_pages
from scheduling.reservations import Reservations
from scheduling.sequence import Sequence


class SwapSpace(Reservations):
    """The reservations of a scheduler that swaps: set as its `batch.pages`. It takes the times that `simulate` adds."""

    def __init__(self, pool: PagePool | None, transfer: Transfer, tokens: int) -> None:
        super().__init__(pool)
        self._transfer = transfer
        self._free = tokens
        self._out: dict[Sequence, int] = {}  # computed tokens of the requests that are swapped out
        self._moved = 0

    def release(self, seq: Sequence) -> None:
        tokens = in_whole_pages(seq.computed, self.page_size)
        if seq.finish_reason is None and 0 < tokens <= self._free:
            self._out[seq] = seq.computed
            self._free -= tokens
            self._moved += tokens
        super().release(seq)

    def reserve(self, seq: Sequence, tokens: int) -> bool:
        if not super().reserve(seq, tokens):
            return False
        computed = self._out.pop(seq, 0)
        tokens_out = in_whole_pages(computed, self.page_size)
        self._free += tokens_out
        # The tokens that it finds in the prefix cache need not come back, unless they are still to be computed.
        if computed > seq.computed:
            self._moved += tokens_out - self.sound(seq)
            seq.computed = computed
        return True

    def seconds(self) -> float:
        """Return how long the moves since the last call take."""
        moved, self._moved = self._moved, 0
        return self._transfer.seconds(moved)
