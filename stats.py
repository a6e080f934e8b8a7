"""The figures of `/stats`: the original's `ServerStats` as a view of what `observe.meters` counts.

The original's four figures keep their names and formulas (docs/api.md). This module must not know HTTP or tensors.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from observe.meters import Meters


def percentiles(values: Iterable[float], ranks: Sequence[float]) -> list[float | None]:
    """Return these percentiles, interpolated between neighbors as numpy does, which would take 0.1 s to import."""
    ordered = sorted(values)
    if not ordered:
        return [None] * len(ranks)
    result: list[float | None] = []
    for rank in ranks:
        at = rank / 100 * (len(ordered) - 1)
        low = int(at)
        below, above = ordered[low], ordered[min(low + 1, len(ordered) - 1)]
        result.append(below + (above - below) * (at - low))
    return result


class ServerStats:
    """The original's statistics, and percentiles; every method may be called from any thread."""

    def __init__(self, meters: Meters | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.meters = meters or Meters()
        self.table: dict[int, tuple[float, int]] = {}
        self._clock = clock
        self._started_at = clock()
        self._ids = itertools.count()

    @property
    def total_tokens(self) -> int:
        return self.meters.completed.tokens

    @property
    def total_elapsed(self) -> float:
        return self.meters.completed.latency.seconds

    @property
    def total_requests(self) -> int:
        return self.meters.completed.latency.count

    @property
    def total_latency(self) -> float:
        return self.meters.completed.seconds_per_token

    def start_request(self, num_tokens: int) -> int:
        """Record the start of a request of `num_tokens` tokens; return its number."""
        rid = next(self._ids)
        self.table[rid] = (self._clock(), num_tokens)
        return rid

    def finish_request(self, rid: int) -> None:
        """Record that the request with this number has all its tokens."""
        arrived, tokens = self.table.pop(rid)
        self.meters.completed.add(arrived, self._clock(), tokens, tokens)

    def latency_per_token(self) -> float | None:
        """Return the mean over requests of seconds per token."""
        with self.meters.completed.lock:
            return self.total_latency / self.total_requests if self.total_requests else None

    def throughput(self) -> float | None:
        """Return tokens over the sum of latencies: the original's formula, low by about the concurrency."""
        with self.meters.completed.lock:
            return self.total_tokens / self.total_elapsed if self.total_elapsed > 0 else None

    def throughput_wall(self) -> float | None:
        """Return tokens of completed requests over the seconds from first arrival to last completion."""
        completed = self.meters.completed
        with completed.lock:
            if completed.first_arrival is None or completed.last_finish <= completed.first_arrival:
                return None
            return completed.tokens / (completed.last_finish - completed.first_arrival)

    def token_breakdown(self) -> dict[int, float]:
        """Return mean latency in seconds by requested number of tokens, fewest tokens first."""
        with self.meters.completed.lock:
            return {n: each.seconds / each.count for n, each in sorted(self.meters.completed.by_max_tokens.items())}

    def snapshot(self) -> dict[str, Any]:
        """Return the original's four keys, and more figures about requests."""
        m, finished = self.meters, self.meters.finished.copy()
        cancelled, timed_out = finished["cancelled"] + finished["abort"], finished["timeout_error"]
        result: dict[str, Any] = {
            "latency-per-token": self.latency_per_token(),
            "throughput": self.throughput(),
            "total-tokens-handled": self.total_tokens,
            "total-elapsed-time": self.total_elapsed,
            "requests": self.total_requests,
            "requests-failed": finished.total() - finished["stop"] - finished["length"] - cancelled - timed_out,
            "requests-cancelled": cancelled,
            "requests-timed-out": timed_out,
            "throughput-wall": self.throughput_wall(),
        }
        for name, recent, ranks in (
            ("latency", m.recent_latency, (50, 90, 99)),
            ("ttft", m.recent_ttft, (50, 99)),
            ("tpot", m.recent_tpot, (50, 99)),
            ("itl", m.recent_itl, (50, 99)),
        ):
            result |= {f"{name}-p{rank}": value for rank, value in zip(ranks, percentiles(recent, ranks))}
        return result

    def engine(self) -> dict[str, Any]:
        """Return figures about the loop: iterations, batch sizes, how slot-steps were spent."""
        batches = sorted(self.meters.batches.copy().items())
        spent = self.meters.spent
        return {
            "iterations": sum(steps.count for _, steps in batches),
            "uptime_s": self._clock() - self._started_at,
            "batch_stats": [
                {"batch_size": size, "count": steps.count, "seconds": steps.seconds} for size, steps in batches
            ],
            "slot_steps": spent._asdict(),
            "preemptions": self.meters.preemptions,
            "mask_seconds": self.meters.mask_seconds,
            "drafts": {
                "times": self.meters.drafts,
                "tokens": self.meters.draft_tokens,
                "accepted": sum(self.meters.accepted_at),
            },
            "batch_fill": spent.fill,
            "rows_in_vain": spent.in_vain,
        }
