"""Prefix caches compared: llm-mock's static trie, which keeps the most visited prefixes, and a live cache of pages.

Prompts are served by the simulator, with the trie in place of the page pool, so that hits save time.
"""

from __future__ import annotations

import collections.abc as abc
import heapq
from collections.abc import Iterable
from typing import Any

import numpy as np

from client.workloads.catalog import llm_mock_output
from costs.cost import Cost, Host
from scheduling.pages import PagePool
from scheduling.reservations import Reservations
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.result import tpots
from simulate.scenario import Chosen, EngineSize
from simulate.simulator import Run, simulate

PAGE_SIZE = 16
KINDS = ("trie", "live", "live+lpm")


class Trie:
    """llm-mock's static cache: of all paths that `prompts` take, the `edges` most visited, from the root on.

    Ties go to the smaller token. A kept edge's parent is kept, since it is visited at least as often.
    """

    def __init__(self, prompts: Iterable[abc.Sequence[int]], edges: int) -> None:
        root: dict[int, list[Any]] = {}
        for prompt in prompts:
            node = root
            for token in prompt:
                entry = node.setdefault(token, [0, {}])
                entry[0] += 1
                node = entry[1]
        self.root: dict[int, Any] = {}
        self.edges = 0
        count = 0  # breaks ties of ties, so that nodes are never compared
        heap = [(-n, token, i, children, self.root) for i, (token, (n, children)) in enumerate(root.items())]
        count = len(heap)
        heapq.heapify(heap)
        while heap and self.edges < edges:
            _, token, _, children, kept = heapq.heappop(heap)
            below: dict[int, Any] = kept.setdefault(token, {})
            self.edges += 1
            for child, (n, more) in children.items():
                count += 1
                heapq.heappush(heap, (-n, child, count, more, below))

    def serve(self, blocks: abc.Sequence[int]) -> int:
        """Return the length of the longest path from the root; nothing is kept."""
        node, hits = self.root, 0
        for block in blocks:
            if block not in node:
                break
            node, hits = node[block], hits + 1
        return hits


class TrieReservations(Reservations):
    """Unlimited pages, and prefixes that are found in a trie, which never changes. One token is always computed."""

    def __init__(self, trie: Trie) -> None:
        super().__init__(None)
        self.trie = trie

    def reserve(self, seq: Sequence, tokens: int) -> bool:
        seq.cached = seq.computed = min(self.trie.serve(seq.prompt_ids), len(seq.prompt_ids) - 1)
        return True


class LivePool(PagePool):
    """The server's pages: enough for all running requests, and `kept` pages with the most recent prompts.

    In the server all free pages are kept; here their number is fixed, so that caches of equal size can be compared.
    """

    def __init__(self, running: int, kept: int) -> None:
        super().__init__(running + kept + 1, PAGE_SIZE)
        self.kept = kept

    def release(self, pages: list[int], seq: Sequence | None = None) -> None:
        super().release(pages, seq)
        while self.cached > self.kept:
            self._blank.append(self._forget())

    def warm(self, prompts: abc.Sequence[list[int]]) -> None:
        """Serve prompts to fill the cache, without those whose pages would be evicted by the end anyway."""
        last: list[tuple[list[bytes], list[int]]] = []
        known: set[bytes] = set()
        for prompt in reversed(prompts):
            if len(known) >= self.kept:
                break
            last.append((self.hashes(prompt), prompt))
            known.update(last[-1][0])
        for keys, prompt in reversed(last):
            reserved = self.reserve(keys, len(prompt))
            assert reserved is not None, "running requests must fit, and one must run"
            self.publish(reserved[0], keys)
            self.release(reserved[0])


def prompts(count: int, seed: int, share: int = 0, kinds: int = 10) -> list[list[int]]:
    """Draw prompts of Zipf-like tokens; with `share`, each begins with one of `kinds` system prompts that long."""
    rng = np.random.default_rng([seed, share])
    systems = np.random.default_rng([7, share]).integers(0, 5000, (kinds, share))
    drawn = []
    for _ in range(count):
        own = np.minimum(rng.zipf(1.3, int(rng.integers(20, 400))), 50_000)
        drawn.append([*systems[int(rng.integers(kinds))].tolist(), *own.tolist()])
    return drawn


def serve(cost: Cost, served: abc.Sequence[list[int]], slots: int, trie: Trie, host: Host | None = None) -> Run:
    """Serve prompts that all arrive at once, first come first served, behind a trie."""
    scheduler = EngineSize(slots, 1 << 30).scheduler(Chosen("dynamic"))
    scheduler.batch.pages = TrieReservations(trie)
    return _burst(scheduler, served, cost, host)


def serve_live(
    cost: Cost, served: abc.Sequence[list[int]], slots: int, tokens: int, before: abc.Sequence[list[int]],
    order: str = "fcfs", host: Host | None = None,
) -> Run:  # fmt: skip
    """Serve prompts that all arrive at once behind a live cache of `tokens`, which saw others `before`."""
    longest = max(len(prompt) + llm_mock_output(len(prompt)) + 1 for prompt in (*served, *before))
    pool = LivePool(slots * -(-longest // PAGE_SIZE), tokens // PAGE_SIZE)
    pool.warm(before)
    policy = Chosen(f"dynamic+{order}").policy(slots)
    return _burst(Scheduler(policy, pool, 1 << 30), served, cost, host)


def _burst(scheduler: Scheduler, served: abc.Sequence[list[int]], cost: Cost, host: Host | None = None) -> Run:
    # llm-mock computes one token more than it counts.
    sequences = [Sequence(p, llm_mock_output(len(p)) + 1, id=str(i)) for i, p in enumerate(served)]
    return simulate(scheduler, sequences, cost, host)


def experiment(
    cost: Cost,
    sizes: Iterable[int] = (0, 100, 1000, 5000),
    batches: Iterable[int] = (1, 5, 10, 20),
    share: int = 0,
    train: int = 5000,
    kinds: Iterable[str] = ("trie",),
    host: Host | None = None,
) -> list[dict[str, Any]]:
    """Repeat llm-mock's table: 50 prompts after a cache of `train` others, over cache and batch sizes.

    `kinds` of caches: "trie" is llm-mock's; "live" and "live+lpm" are pages of equal size, the latter admits the
    longest hit first. "p99_latency_per_token_ms" is llm-mock's TPOT: latency by output tokens; ours stands
    beside it.
    """
    built, served = prompts(train, 1, share), prompts(50, 2, share)
    rows = []
    for kind in kinds:
        for size in sizes:
            trie = Trie(built if size else [], size) if kind == "trie" else None
            for batch in batches:
                if trie is not None:
                    run = serve(cost, served, batch, trie, host)
                else:
                    order = kind.partition("+")[2] or "fcfs"
                    run = serve_live(cost, served, batch, size, built, order, host)
                rows.append({"kind": kind, "cache": size, "batch": batch, **_measures(run)})
    return rows


def _measures(run: Run) -> dict[str, float]:
    per_token = run.latency / (run.tokens - 1)
    return {
        "hit_tokens": float(np.mean([seq.cached for seq in run.sequences])),
        "requests_per_s": len(run.done) / run.makespan,
        "p99_ttft_s": float(np.percentile(run.ttft, 99)),
        "p99_latency_per_token_ms": float(np.percentile(per_token, 99) * 1e3),
        "p99_tpot_ms": float(np.percentile(tpots(run), 99) * 1e3),
    }
