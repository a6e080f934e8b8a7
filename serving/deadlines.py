"""Deadlines, token rate and rate limit.

Each object is used by a single thread and reads no clock: times are arguments. This module must not know HTTP, threads,
or how requests are scheduled.
"""

from __future__ import annotations

import heapq
import math
from itertools import count

from serving.inference import Inference, InferenceError, timeout_error

MEMORY_SECONDS = 10.0  # of work that the average rate covers; older work decays


class Deadlines:
    """The deadlines of requests: one for the wait in the queue and one for the whole request.

    `queue_timeout` and `request_timeout` are the server's limits in seconds; a request may have shorter ones.
    """

    def __init__(self, queue_timeout: float = math.inf, request_timeout: float = math.inf) -> None:
        self.queue_timeout = queue_timeout
        self.request_timeout = request_timeout
        self.next_at = math.inf  # the time of the next deadline
        self._heap: list[tuple[float, int, Inference, float, bool]] = []
        self._numbers = count()

    def add(self, inference: Inference) -> None:
        """Add a request."""
        queue_seconds = min(self.queue_timeout, inference.queue_timeout)
        seconds = min(self.request_timeout, inference.request_timeout)
        if queue_seconds < seconds:
            self._push(inference, queue_seconds, in_queue=True)
        if seconds < math.inf:
            self._push(inference, seconds, in_queue=False)

    def _push(self, inference: Inference, seconds: float, in_queue: bool) -> None:
        when = inference.sequence.arrived_at + seconds
        heapq.heappush(self._heap, (when, next(self._numbers), inference, seconds, in_queue))
        self.next_at = self._heap[0][0]

    def expire(self, now: float) -> list[Inference]:
        """End the requests that are past a deadline, and return them."""
        ended = []
        while self._heap and self._heap[0][0] <= now:
            _, _, inference, seconds, in_queue = heapq.heappop(self._heap)
            began = inference.sequence.scheduled_at is not None
            if inference.is_finished or (in_queue and began):
                continue
            late = f"timed out after {seconds:g} s in the queue. Try again later, or raise --queue-timeout"
            if inference.finished(InferenceError("timeout_error", late) if in_queue else timeout_error(seconds)):
                ended.append(inference)
        self.next_at = self._heap[0][0] if self._heap else math.inf
        return ended

    def prune(self, still_open: int) -> None:
        """Drop requests that finished in time, once in a while."""
        if len(self._heap) > 4 * still_open + 64:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)


class Rate:
    """Tokens per second of work, averaged over the last seconds with work; `parallel` engines work at once."""

    def __init__(self) -> None:
        self.parallel = 1
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def is_known(self) -> bool:
        """Whether there was a step."""
        return self._tokens > 0

    def add(self, tokens: int, seconds: float) -> None:
        """Record one step."""
        seconds /= self.parallel
        decay = math.exp(-seconds / MEMORY_SECONDS)
        self._tokens = self._tokens * decay + tokens
        self._seconds = self._seconds * decay + seconds

    def seconds_for(self, tokens: int) -> float:
        """Return the seconds that this number of tokens takes; 0 before the first step."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0


class TokenBucket:
    """A token bucket: `rate` events per second, and up to `burst` at once after a pause."""

    def __init__(self, rate: float, burst: int) -> None:
        self._interval = 1 / rate
        self._slack = (burst - 1) * self._interval
        self._next = -math.inf  # the earliest time of the next event when there is no burst left

    def take(self, now: float) -> bool:
        """Return whether the event may happen now, and count it if so."""
        due = max(self._next, now - self._slack)
        if due > now:
            return False
        self._next = due + self._interval
        return True
