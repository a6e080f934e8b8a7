"""What happened, in numbers: folds Iteration records and finished requests into `/stats`.

The original's four figures keep their names and formulas (docs/api.md); those beside them say what they
mean. It must not know HTTP, tensors, or how to make a request.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from scheduling.iteration import Iteration, SlotSteps
from scheduling.sequence import Sequence as Request

KEPT = 10_000  # percentiles are taken over so many of the latest values


def percentile(values: Iterable[float], q: float) -> float | None:
    """Return the q-th percentile by linear interpolation (NumPy's default); None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


class ServerStats:
    """Counts requests, tokens, latencies and slot-steps; every method may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.total_tokens = 0
        self.total_elapsed = 0.0
        self.total_requests = 0
        self.total_latency = 0.0
        self.failed = 0
        self.cancelled = 0
        self.timed_out = 0
        self.iterations = 0
        self.table: dict[int, tuple[float, int]] = {}
        self._clock = clock
        self._started_at = clock()
        self._lock = threading.Lock()
        self._ids = count()
        self._by_tokens: dict[int, list[float]] = defaultdict(lambda: [0, 0.0])
        self._first_arrival: float | None = None
        self._last_finish = 0.0
        self._latency, self._ttft, self._tpot, self._itl = (deque[float](maxlen=KEPT) for _ in range(4))
        self._batches: dict[int, list[float]] = defaultdict(lambda: [0, 0.0])
        self._slot_steps = [0.0] * len(SlotSteps._fields)
        self._last_token: dict[str, float] = {}

    def start_request(self, num_tokens: int) -> int:
        """Note that a request of `num_tokens` tokens begins now; return its number."""
        rid = next(self._ids)
        with self._lock:
            self.table[rid] = (self._clock(), num_tokens)
        return rid

    def finish_request(self, rid: int) -> None:
        """Note that the request that `start_request` numbered has all its tokens."""
        with self._lock:
            arrived, tokens = self.table.pop(rid)
            self._count(arrived, self._clock(), tokens, tokens)

    def finish(self, request: Request, outcome: str = "") -> None:
        """Take in a sequence that left the scheduler: by stop or length, or with the error called `outcome`."""
        finished = request.finished_at if request.finished_at is not None else self._clock()
        tokens = len(request.output_ids)
        with self._lock:
            self._last_token.pop(request.id, None)
            if outcome == "timeout_error":
                self.timed_out += 1
            elif request.error is not None:
                self.failed += 1
            elif request.finish_reason == "abort":
                self.cancelled += 1
            elif tokens:
                self._count(request.arrived_at, finished, tokens, request.max_tokens)
                first, last = request.first_token_at, request.last_token_at
                if first is not None and last is not None:
                    self._ttft.append(first - request.arrived_at)
                    if tokens > 1:
                        self._tpot.append((last - first) / (tokens - 1))

    def _count(self, arrived: float, finished: float, tokens: int, asked: int) -> None:
        elapsed = finished - arrived
        self.total_tokens += tokens
        self.total_elapsed += elapsed
        self.total_requests += 1
        self.total_latency += elapsed / tokens
        self._latency.append(elapsed)
        entry = self._by_tokens[asked]
        entry[0] += 1
        entry[1] += elapsed
        if self._first_arrival is None or arrived < self._first_arrival:
            self._first_arrival = arrived
        self._last_finish = max(self._last_finish, finished)

    def record(self, iteration: Iteration) -> None:
        """Take in one step of the loop."""
        with self._lock:
            self.iterations += 1
            entry = self._batches[iteration.batch_size]
            entry[0] += 1
            entry[1] += iteration.seconds
            for i, spent in enumerate(iteration.slot_steps):
                self._slot_steps[i] += spent
            self._note_gaps(iteration, iteration.t + iteration.seconds)

    def _note_gaps(self, iteration: Iteration, end: float) -> None:
        last, gaps = self._last_token, []
        for member in iteration.members:
            id, phase = member.id, member.phase
            if phase == "decode":
                before = last.get(id)
                if before is not None:
                    gaps.append(end - before)
                last[id] = end
            elif phase == "prefill":
                last[id] = end
        self._itl += gaps

    def latency_per_token(self) -> float | None:
        """Return the mean over requests of latency / tokens, in seconds."""
        with self._lock:
            return self.total_latency / self.total_requests if self.total_requests else None

    def throughput(self) -> float | None:
        """Return tokens over the sum of latencies: the original's formula, low by about the concurrency."""
        with self._lock:
            return self.total_tokens / self.total_elapsed if self.total_elapsed > 0 else None

    def throughput_wall(self) -> float | None:
        """Return tokens of completed requests over the time from first arrival to last completion."""
        with self._lock:
            if self._first_arrival is None or self._last_finish <= self._first_arrival:
                return None
            return self.total_tokens / (self._last_finish - self._first_arrival)

    def token_breakdown(self) -> dict[int, float]:
        """Return mean latency in seconds by number of tokens asked for, fewest tokens first."""
        with self._lock:
            return {n: total / times for n, (times, total) in sorted(self._by_tokens.items())}

    def snapshot(self) -> dict[str, Any]:
        """Return the original's four keys and the figures about requests beside them."""
        result: dict[str, Any] = {
            "latency-per-token": self.latency_per_token(),
            "throughput": self.throughput(),
            "total-tokens-handled": self.total_tokens,
            "total-elapsed-time": self.total_elapsed,
            "requests": self.total_requests,
            "requests-failed": self.failed,
            "requests-cancelled": self.cancelled,
            "requests-timed-out": self.timed_out,
            "throughput-wall": self.throughput_wall(),
        }
        with self._lock:
            series: list[tuple[str, Sequence[float], tuple[int, ...]]] = [
                ("latency", list(self._latency), (50, 90, 99)),
                ("ttft", list(self._ttft), (50, 99)),
                ("tpot", list(self._tpot), (50, 99)),
                ("itl", list(self._itl), (50, 99)),
            ]
        for name, values, ranks in series:
            result |= {f"{name}-p{rank}": percentile(values, rank) for rank in ranks}
        return result

    def engine(self) -> dict[str, Any]:
        """Return the figures about the loop: iterations, batch sizes, how slot-steps were spent."""
        with self._lock:
            return {
                "iterations": self.iterations,
                "uptime_s": self._clock() - self._started_at,
                "batch_stats": [
                    {"batch_size": size, "count": times, "seconds": seconds}
                    for size, (times, seconds) in sorted(self._batches.items())
                ],
                "slot_steps": dict(zip(SlotSteps._fields, self._slot_steps)),
            }
