"""What /metrics counts: folded in the loop's thread from each step and each request that leaves, without a lock.

A histogram is a list of numbers, and all tokens of a step that came after the same gap are one act, so that a step of
64 costs some microseconds. What HTTP threads count has a lock. It must not know Prometheus, HTTP or tensors.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from typing import Any

from serving.inference import Inference, outcome

TTFT = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)  # fmt: skip
PER_TOKEN = (.0005, .001, .002, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20,
             40, 80)  # fmt: skip
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
ITERATION_TOKENS = (1, 8, *(16 << i for i in range(11)))
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 1024)
CHOICES = (1, 2, 5, 10, 20)
BATCH = tuple(1 << i for i in range(13))
HUNDREDS = ("2xx", "4xx", "5xx", "cancelled")
REASONS = ("slots_full", "token_budget", "kv_full", "policy_order", "window")


class Histogram:
    """Counts values by the bucket they fall into; one thread writes, any may read."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Progress:
    """A sequence that is open, and how much of it has been counted."""

    __slots__ = ("counted", "last", "seq")

    def __init__(self, seq: Any) -> None:
        self.seq = seq
        self.counted = 0
        self.last: float | None = None


class Meters:
    """All counters and histograms of one server."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.preemptions = 0
        self.finished: Counter[str] = Counter()  # by stop, length, or the kind of error
        self.cancelled: Counter[str] = Counter()  # by queued, prefill, decode
        self.slot_steps: Counter[str] = Counter()
        self.ttft = Histogram(TTFT)
        self.itl = Histogram(PER_TOKEN)
        self.tpot = Histogram(PER_TOKEN)
        self.e2e, self.queue, self.prefill, self.decode, self.inference = (Histogram(LATENCY) for _ in range(5))
        self.prompt_length, self.output_length, self.asked = (Histogram(TOKENS) for _ in range(3))
        self.longest_choice, self.choices = Histogram(TOKENS), Histogram(CHOICES)
        self.iteration_tokens = Histogram(ITERATION_TOKENS)
        self.iteration_seconds = {p: Histogram(PER_TOKEN) for p in ("prefill", "decode", "mixed")}
        self.batch = Histogram(BATCH)
        self.waited = {reason: Histogram(LATENCY) for reason in REASONS}
        self.received = 0  # requests to generate, answered or not
        self.totals: Counter[str] = Counter()  # of their answers
        self.http: Counter[tuple[str, int]] = Counter()
        self.rejected: Counter[str] = Counter()
        self.ignored = 0
        self._lock = threading.Lock()
        self._open: dict[str, Progress] = {}

    def on_arrival(self, inference: Inference) -> None:
        self._open[inference.id] = Progress(inference.sequence)

    def observe(self, iteration: Any, left: list[Inference]) -> None:
        """Take in a step, if there was one, and those who left."""
        if iteration is not None:
            self._step(iteration)
        for inference in left:
            self._leave(inference)

    def _step(self, iteration: Any) -> None:
        end = iteration.t + iteration.seconds
        phases, made = set(), 0
        since, per_step, alike = 0.0, 0, 0  # requests whose last tokens came together have one gap
        for member in iteration.members:
            phase = member.phase
            if phase != "decode" and phase != "prefill":
                continue
            phases.add(phase)
            progress = self._open.get(member.id)
            if progress is None:
                continue
            counted = len(progress.seq.output_ids)
            new, last = counted - progress.counted, progress.last
            if new <= 0:
                continue
            progress.counted, progress.last = counted, end
            made += new
            if last is None:
                self._first_token(progress.seq, end)
                last, new = end, 0
            if last == since and new == per_step:
                alike += 1
            else:
                self._gaps(end - since, per_step, alike)
                since, per_step, alike = last, new, 1
        self._gaps(end - since, per_step, alike)
        self.generation_tokens += made
        self.preemptions += len(getattr(iteration, "displaced", ()))
        self.iteration_tokens.observe(iteration.tokens)
        phase = next(iter(phases)) if len(phases) == 1 else "mixed"
        self.iteration_seconds[phase].observe(iteration.seconds)
        self.batch.observe(iteration.batch_size)
        for kind, spent in iteration.slot_steps._asdict().items():
            self.slot_steps[kind] += spent

    def _gaps(self, seconds: float, tokens: int, times: int) -> None:
        """Take in `tokens` tokens so long after the one before them, of so many requests."""
        if tokens:
            self.itl.observe(seconds / tokens, tokens * times)

    def _first_token(self, seq: Any, now: float) -> None:
        self.prompt_tokens += len(seq.prompt_ids)
        self.ttft.observe(now - seq.arrived_at)

    def _leave(self, inference: Inference) -> None:
        self._open.pop(inference.id, None)
        seq = inference.sequence
        end = outcome(inference)
        self.finished[end] += 1
        for reason, (_, seconds) in seq.waited.items():
            self.waited[reason].observe(seconds)
        if end == "cancelled":
            begun = seq.scheduled_at is not None
            self.cancelled["decode" if seq.output_ids else "prefill" if begun else "queued"] += 1
        if end not in ("stop", "length") or seq.scheduled_at is None or seq.finished_at is None:
            return
        first = seq.finished_at if seq.first_token_at is None else seq.first_token_at
        last = seq.finished_at if seq.last_token_at is None else seq.last_token_at
        tokens = len(seq.output_ids)
        self.e2e.observe(seq.finished_at - seq.arrived_at)
        self.queue.observe(seq.scheduled_at - seq.arrived_at)
        self.prefill.observe(first - seq.scheduled_at)
        self.decode.observe(last - first)
        self.inference.observe(last - seq.scheduled_at)
        if tokens > 1:
            self.tpot.observe((last - first) / (tokens - 1))
        self.prompt_length.observe(len(seq.prompt_ids))
        self.output_length.observe(tokens)
        self.asked.observe(seq.max_tokens)

    def arrived(self) -> None:
        """Take in that a request to generate is here; `answered` once for each makes the books balance."""
        with self._lock:
            self.received += 1

    def answered(
        self, route: str, status: int, rejected: str | None, ignored: int, outputs: list[int], generates: bool = False
    ) -> None:
        """Take in an HTTP request that has its answer, with the tokens of each of its choices."""
        with self._lock:
            if generates:
                self.totals["cancelled" if status == 499 else f"{status // 100}xx"] += 1
            self.http[route, status] += 1
            self.ignored += ignored
            if rejected is not None:
                self.rejected[rejected] += 1
            if outputs:
                self.choices.observe(len(outputs))
                self.longest_choice.observe(max(outputs))

    def http_totals(self) -> dict[str, int]:
        """Return how many requests to generate came, and how many were answered by the hundreds of their status."""
        with self._lock:
            return {"received": self.received, **{name: self.totals[name] for name in HUNDREDS}}
