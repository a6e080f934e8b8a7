"""Prefix tree: requests with the same prompt prefix run one after the other, so that it is computed once.

All waiting prompts form a tree of KV pages (BatchLLM, arXiv 2412.03594; SGLang does the same with what is cached already).
It is walked depth first, so a prefix stays in the cache until its last waiting request has joined. Where it branches, what
was begun goes on, and then the branch with the fewest tokens to compute for each token to generate is next: long answers
begin early and fill the end, and the longest prompts come last.

The tree is of the requests that arrive within `window` seconds; those of the next window follow. So no request is
overtaken by one that arrives more than `window` seconds later.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Any

from scheduling import policy
from scheduling.options import option
from scheduling.sequence import Sequence

Entry = tuple[int, float, float, int, Any]  # window, when it was begun, tokens per answer token, number, what it is
PREEMPTED = -1  # the window of requests that were preempted, which go before all others


@dataclass(slots=True, eq=False)
class Branch:
    """Waiting requests whose prompts have `blocks` behind those of `parent`; the sums are over all that are below."""

    blocks: list[bytes]
    parent: Branch | None = None
    end: int = 0  # blocks from the root to here
    begun: float = inf  # when a request below it joined first, as a number that counts up
    number: int = 0
    tokens: int = 0  # to compute, those of shared blocks once
    answers: int = 0  # tokens to generate
    entry: Entry | None = None  # its own among those of `parent`
    entries: list[Entry] = field(default_factory=list)  # branches, and requests whose last full block is this one's
    children: dict[bytes, Branch] = field(default_factory=dict)  # by their first block


class Order(policy.Policy):
    window = option(60.0, "seconds of arrivals that are ordered as one tree", low=0.0)

    def __init__(self) -> None:
        self.claims = self.claims.but(uses=("prefix",), overtakes=self.window, overtaking_tokens=0)
        self._root = Branch([])
        self._places: dict[Sequence, tuple[Branch, Entry]] = {}
        self._count = count()
        self._window, self._opened = 0, -inf

    def order(self, waiting: Collection[Sequence], now: float) -> Iterable[Sequence]:
        while self._root.entries:
            window = self._root.entries[0][0]
            yield from self._walk(window)
            if self._root.entries and self._root.entries[0][0] == window:
                return  # the others wait until all of this window have joined

    def _walk(self, window: int) -> Iterator[Sequence]:
        """Yield the requests of a window depth first."""
        path: list[tuple[Branch, Iterator[Entry]]] = [(self._root, iter(list(self._root.entries)))]
        while path:
            entry = next(path[-1][1], None)
            if entry is None or entry[0] > window:
                path.pop()
                continue
            item = entry[-1]
            if isinstance(item, Branch):
                path.append((item, iter(list(item.entries))))
            elif item in self._places:
                yield item

    def on_arrival(self, seq: Sequence, now: float) -> None:
        super().on_arrival(seq, now)
        if seq.arrived_at >= self._opened + self.window:
            self._window, self._opened = self._window + 1, seq.arrived_at
        self._put(seq, PREEMPTED if seq.preemptions else self._window)

    def on_preempt(self, seq: Sequence, now: float) -> None:
        super().on_preempt(seq, now)
        self._put(seq, PREEMPTED)

    def on_admit(self, seq: Sequence, now: float) -> None:
        super().on_admit(seq, now)
        self._drop(seq, begun=next(self._count))

    def on_finish(self, seq: Sequence, now: float) -> None:
        super().on_finish(seq, now)
        self._drop(seq)

    def _put(self, seq: Sequence, window: int) -> None:
        """Hang a request into the tree."""
        blocks, branch, fresh = seq.hashes, self._root, 0
        while branch.end < len(blocks):
            child = branch.children.get(blocks[branch.end])
            if child is None:
                is_cached = self.cached_tokens(seq) > branch.end * self.page_size
                child = Branch(blocks[branch.end :], branch, len(blocks), number=next(self._count))
                child.begun = child.number if is_cached else inf
                branch.children[child.blocks[0]] = child
                fresh = len(child.blocks) * self.page_size
            branch = self._split(child, blocks)
        tokens, answers = self._work(seq)
        entry = (window, inf, tokens / answers, next(self._count), seq)
        insort(branch.entries, entry)
        self._places[seq] = branch, entry
        self._update(branch, tokens + fresh, answers)

    def _split(self, branch: Branch, blocks: list[bytes]) -> Branch:
        """Return the branch with those blocks of this one that are in `blocks` too; what is left is below it."""
        start = branch.end - len(branch.blocks)
        shared = next((i for i, pair in enumerate(zip(branch.blocks, blocks[start:])) if pair[0] != pair[1]), None)
        shared = min(len(branch.blocks), len(blocks) - start) if shared is None else shared
        if shared == len(branch.blocks):
            return branch
        assert branch.parent is not None
        upper = Branch(branch.blocks[:shared], branch.parent, start + shared, branch.begun, next(self._count),
                       branch.tokens, branch.answers, branch.entry)  # fmt: skip
        branch.parent.children[upper.blocks[0]] = upper
        branch.blocks, branch.parent, branch.entry = branch.blocks[shared:], upper, None
        branch.tokens -= shared * self.page_size
        upper.children[branch.blocks[0]] = branch
        self._update(branch)
        return upper

    def _drop(self, seq: Sequence, begun: float = inf) -> None:
        """Take a request out of the tree, if it is in it."""
        place = self._places.pop(seq, None)
        if place is not None:
            branch, entry = place
            del branch.entries[bisect_left(branch.entries, entry)]
            tokens, answers = self._work(seq)
            self._update(branch, -tokens, -answers, begun)

    def _work(self, seq: Sequence) -> tuple[int, int]:
        """Return the tokens behind the last full block of a prompt, and those of its answer, a guess if it is open."""
        tail = seq.length - len(seq.hashes) * self.page_size
        return max(1, tail), self.margin if seq.open_ended else max(1, seq.max_tokens)

    def _update(self, branch: Branch, tokens: int = 0, answers: int = 0, begun: float = inf) -> None:
        """Add to the sums of a branch and of those above it, and sort them in again."""
        while branch.parent is not None:
            parent = branch.parent
            branch.tokens += tokens
            branch.answers += answers
            branch.begun = min(branch.begun, begun)
            if branch.entry is not None:
                del parent.entries[bisect_left(parent.entries, branch.entry)]
            if branch.entries:
                cost = branch.tokens / branch.answers
                branch.entry = (branch.entries[0][0], branch.begun, cost, branch.number, branch)
                insort(parent.entries, branch.entry)
            else:
                del parent.children[branch.blocks[0]]
                tokens -= len(branch.blocks) * self.page_size
            branch = parent
