"""What vLLM and this project's scheduler see of each other: vLLM sees a waiting queue, the scheduler sees pages.

This module must not import vLLM; `owner` is its scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from scheduling.pages import pages_for
from scheduling.reservations import Reservations
from scheduling.sequence import Sequence


class Queue:
    """vLLM's waiting queue `own`; inside a step it shows only `line`, the requests that may join, unless that is None."""

    def __init__(self, owner: Any, own: Any) -> None:
        self._owner, self.own = owner, own
        self.line: deque[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def prepend_request(self, request: Any) -> None:
        self.own.prepend_request(request)
        if self._owner.plans is not None:
            self._owner.lost.append(request.request_id)

    def peek_request(self) -> Any:
        return self.own.peek_request() if self.line is None else self.line[0]

    def pop_request(self) -> Any:
        if self.line is None:
            return self.own.pop_request()
        request = self.line.popleft()
        self.own.remove_request(request)
        return request

    def __bool__(self) -> bool:
        return bool(self.own if self.line is None else self.line)

    def __len__(self) -> int:
        return len(self.own)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.own)


class Blocks(Reservations):
    """vLLM's blocks as the pages of a scheduler, which only asks whether there are enough: vLLM itself allocates them."""

    def __init__(self, owner: Any) -> None:
        super().__init__(None)
        self._owner, self._size, self._blocks = owner, int(owner.block_size), owner.kv_cache_manager.block_pool
        self._promised: dict[Sequence, int] = {}  # blocks with which a running request joined, until it has them
        self._free = 0

    def count(self) -> None:
        """Count the free blocks that no running request was promised, before a step."""
        rest = {seq: pages - pages_for(seq.computed, self._size) for seq, pages in self._promised.items()}
        self._promised = {seq: self._promised[seq] for seq, more in rest.items() if more > 0}
        self._free = int(self._blocks.get_num_free_blocks()) - sum(rest[seq] for seq in self._promised)

    @property
    def free_tokens(self) -> int:
        return max(0, self._free) * self._size

    @property
    def page_size(self) -> int:
        return self._size

    @property
    def usage(self) -> tuple[int, int]:
        total = int(self._blocks.num_gpu_blocks) - 1  # without vLLM's empty block
        return total - int(self._blocks.get_num_free_blocks()), total

    def cached_tokens(self, seq: Sequence) -> int:
        request = self._owner.requests.get(seq.id)
        return 0 if request is None else int(self._owner.kv_cache_manager.get_computed_blocks(request)[1])

    def reserve(self, seq: Sequence, tokens: int) -> bool:
        blocks, cached = self._owner.kv_cache_manager.get_computed_blocks(self._owner.requests[seq.id])[:2]
        shared = sum(block.ref_cnt > 0 for block in blocks.blocks[0]) if cached else 0
        needed = pages_for(tokens, self._size) - shared
        if needed > self._free and self._owner.plans.running:  # alone, whatever fits into the engine may try
            return False
        self._free -= needed
        self._promised[seq] = pages_for(tokens, self._size)
        seq.computed = int(cached)
        seq.cached = seq.cached if seq.preemptions else seq.computed
        return True

    def release(self, seq: Sequence) -> None:
        self._promised.pop(seq, None)
        self._free += pages_for(seq.computed, self._size)
