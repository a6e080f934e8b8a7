"""The one aggregator: it folds steps, finished requests and HTTP answers into what `/stats` and `/metrics` show.

The loop's thread writes without a lock, and readers copy. All tokens of a step that follow the same gap are one
update, so that a step of 64 requests costs microseconds. Counters that HTTP threads write have a lock. This module must
not know Prometheus, HTTP or tensors.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from scheduling.iteration import Iteration, SlotSteps
from scheduling.sequence import WAIT_REASONS, Sequence
from serving.inference import Inference, outcome

TTFT = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)  # fmt: skip
PER_TOKEN = (.0005, .001, .002, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20,
             40, 80)  # fmt: skip
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
ITERATION_TOKENS = (1, 8, *(16 << i for i in range(11)))
TOKENS = (*(m * 10**e for e in range(5) for m in (1, 2, 5)), 100_000)
CHOICES = (1, 2, 5, 10, 20)
BATCH = tuple(1 << i for i in range(13))
STATUS_CLASSES = ("2xx", "4xx", "5xx", "cancelled")

RECENT = 10_000  # values of each latency that are kept for percentiles


class Histogram:
    """Counts values by bucket; one thread writes, any may read."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


@dataclass(slots=True)
class Progress:
    """An open sequence, and how much of it has been counted."""

    seq: Sequence
    is_background: bool  # its latencies are not those of a client that waits
    counted: int = 0
    last: float | None = None


@dataclass(slots=True)
class Totals:
    """A number of things and the seconds they took together."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds


@dataclass(slots=True)
class Completed:
    """Totals of the requests that were answered; `add` and readers that need several fields take the lock."""

    latency: Totals = field(default_factory=Totals)
    tokens: int = 0
    seconds_per_token: float = 0.0  # summed over requests
    by_max_tokens: defaultdict[int, Totals] = field(default_factory=lambda: defaultdict(Totals))
    first_arrival: float | None = None
    last_finish: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, arrived: float, finished: float, tokens: int, max_tokens: int) -> None:
        elapsed = finished - arrived
        with self.lock:
            self.latency.add(elapsed)
            self.by_max_tokens[max_tokens].add(elapsed)
            self.tokens += tokens
            self.seconds_per_token += elapsed / tokens
            self.first_arrival = arrived if self.first_arrival is None else min(arrived, self.first_arrival)
            self.last_finish = max(self.last_finish, finished)


class Meters:
    """All counters and histograms of one server."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.preemptions = 0
        self.drafts = 0  # times that a request had draft tokens in a step
        self.draft_tokens = 0
        self.mask_seconds = 0.0  # that steps waited for token masks
        self.experts = {"read": 0.0, "unread": 0.0}  # of a mixture, over all layers and steps
        self.accepted_at: list[int] = []  # by the place of a draft: how often it was right
        self.finished: Counter[str] = Counter()  # by stop, length, or the kind of error
        self.cancelled: Counter[str] = Counter()  # by queued, prefill, decode
        self.completed = Completed()
        self.batches: defaultdict[int, Totals] = defaultdict(Totals)  # steps by batch size
        self.slot_steps = dict.fromkeys(SlotSteps._fields, 0.0)
        self.recent_latency, self.recent_ttft, self.recent_tpot, self.recent_itl = (
            deque[float](maxlen=RECENT) for _ in range(4)
        )
        self.ttft = Histogram(TTFT)
        self.itl = Histogram(PER_TOKEN)
        self.tpot = Histogram(PER_TOKEN)
        self.e2e, self.queue, self.prefill, self.decode, self.inference = (Histogram(LATENCY) for _ in range(5))
        self.prompt_length, self.output_length, self.max_tokens = (Histogram(TOKENS) for _ in range(3))
        self.longest_choice, self.choices = Histogram(TOKENS), Histogram(CHOICES)
        self.iteration_tokens = Histogram(ITERATION_TOKENS)
        self.iteration_seconds = {p: Histogram(PER_TOKEN) for p in ("prefill", "decode", "mixed")}
        self.waited = {reason: Histogram(LATENCY) for reason in WAIT_REASONS}
        self.received = 0  # requests to generate, answered or not
        self.totals: Counter[str] = Counter()  # of their answers
        self.http: Counter[tuple[str, int]] = Counter()
        self.rejected: Counter[str] = Counter()
        self.ignored = 0
        self._lock = threading.Lock()
        self._open: dict[str, Progress] = {}
        # The members of the last step if each got one token, how often that was since they were noted, and its end.
        self._alike: list[Progress] = []
        self._repeats, self._ended, self._clients = 0, 0.0, 0

    @property
    def batch_sizes(self) -> Histogram:
        """The number of steps by batch size."""
        histogram = Histogram(BATCH)
        for size, steps in self.batches.copy().items():
            histogram.observe(size, steps.count)
        return histogram

    def on_arrival(self, inference: Inference) -> None:
        self._open[inference.id] = Progress(inference.sequence, inference.is_background)

    @property
    def spent(self) -> SlotSteps:
        """How the slots were spent so far."""
        return SlotSteps(**self.slot_steps)

    def observe(self, iteration: Iteration | None, left: list[Inference]) -> None:
        """Count a step, if there was one, and the requests that left."""
        if iteration is not None:
            self._count_tokens(iteration)
            self._count_step(iteration)
        for inference in left:
            self._count_departure(inference)

    def _count_tokens(self, iteration: Iteration) -> None:
        end, new_tokens = iteration.t + iteration.seconds, 0
        is_even = iteration.repeats and not iteration.left  # who fails gets no token, and leaves
        if is_even and self._alike:
            self._count_gaps(end - self._ended, 1, self._clients)
            self.generation_tokens += len(self._alike)
            self._repeats, self._ended = self._repeats + 1, end
            return
        for one in self._alike if self._repeats else ():
            one.counted, one.last = one.counted + self._repeats, self._ended
        self._alike, self._repeats, self._ended, even = [], 0, end, list[Progress]()
        since, per_step, alike = 0.0, 0, 0  # requests whose last tokens came together have the same gap
        members = iteration.members.shared
        for id, phase in zip(members.id, members.phase):
            if phase != "decode" and phase != "prefill":
                continue
            progress = self._open.get(id)
            is_even = is_even and progress is not None
            if progress is None:
                continue
            counted = len(progress.seq.output_ids)
            new, last = counted - progress.counted, progress.last
            is_even = is_even and new == 1 and last is not None
            if new <= 0:
                continue
            if is_even:
                even.append(progress)
            progress.counted, progress.last = counted, end
            new_tokens += new
            if last is None:
                self.prompt_tokens += len(progress.seq.prompt_ids)
                if not progress.is_background:
                    self.ttft.observe(end - progress.seq.arrived_at)
                last, new = end, 0
            if progress.is_background:
                continue
            if last == since and new == per_step:
                alike += 1
            else:
                self._count_gaps(end - since, per_step, alike)
                since, per_step, alike = last, new, 1
        self._count_gaps(end - since, per_step, alike)
        self.generation_tokens += new_tokens
        self._alike = even if is_even else []
        self._clients = sum([not progress.is_background for progress in self._alike])

    def _count_gaps(self, seconds: float, tokens: int, requests: int) -> None:
        """Count `tokens` tokens for each of some requests, `seconds` after the tokens before them."""
        if tokens:
            gap, times = seconds / tokens, tokens * requests
            self.itl.observe(gap, times)
            self.recent_itl.extend([gap] * times)

    def _count_step(self, iteration: Iteration) -> None:
        phases = {*iteration.members.shared.phase} & {"prefill", "decode"}
        phase = phases.pop() if len(phases) == 1 else "mixed"
        self.preemptions += len(iteration.preempted)
        for _, drafted, accepted in iteration.drafts:
            self._count_drafts(drafted, accepted)
        self.mask_seconds += iteration.mask_seconds
        if iteration.experts:
            read, of = iteration.experts
            self.experts = {"read": self.experts["read"] + read, "unread": self.experts["unread"] + of - read}
        self.iteration_tokens.observe(iteration.tokens)
        self.iteration_seconds[phase].observe(iteration.seconds)
        self.batches[iteration.batch_size].add(iteration.seconds)
        for kind, spent in zip(SlotSteps._fields, iteration.slot_steps):
            self.slot_steps[kind] += spent

    def _count_drafts(self, drafted: int, accepted: int) -> None:
        self.drafts += 1
        self.draft_tokens += drafted
        more = drafted - len(self.accepted_at)
        if more > 0:
            self.accepted_at = self.accepted_at + [0] * more
        for place in range(accepted):
            self.accepted_at[place] += 1

    def _count_departure(self, inference: Inference) -> None:
        self._open.pop(inference.id, None)
        seq = inference.sequence
        end = outcome(inference)
        self.finished[end] += 1
        for reason, (_, seconds) in seq.waited.items():
            self.waited[reason].observe(seconds)
        if end == "cancelled":
            started = seq.scheduled_at is not None
            self.cancelled["decode" if seq.output_ids else "prefill" if started else "queued"] += 1
        elif end in ("stop", "length") and not inference.is_background:
            self._count_completion(seq)

    def _count_completion(self, seq: Sequence) -> None:
        if seq.scheduled_at is None or seq.finished_at is None:
            return
        first = seq.finished_at if seq.first_token_at is None else seq.first_token_at
        last = seq.finished_at if seq.last_token_at is None else seq.last_token_at
        latency, tokens = seq.finished_at - seq.arrived_at, len(seq.output_ids)
        for histogram, value in (
            (self.e2e, latency),
            (self.queue, seq.scheduled_at - seq.arrived_at),
            (self.prefill, first - seq.scheduled_at),
            (self.decode, last - first),
            (self.inference, last - seq.scheduled_at),
            (self.prompt_length, len(seq.prompt_ids)),
            (self.output_length, tokens),
            (self.max_tokens, seq.max_tokens),
        ):  # without a call for each
            histogram.counts[bisect_left(histogram.bounds, value)] += 1
            histogram.sum += value
        if tokens:
            self.completed.add(seq.arrived_at, seq.finished_at, tokens, seq.max_tokens)
            self.recent_latency.append(latency)
            self.recent_ttft.append(first - seq.arrived_at)
        if tokens > 1:
            self.tpot.observe((last - first) / (tokens - 1))
            self.recent_tpot.append((last - first) / (tokens - 1))

    def arrived(self, n: int = 1) -> None:
        """Count requests to generate; `answered` follows once for each."""
        with self._lock:
            self.received += n

    def answered(
        self, route: str, status: int, rejected: str | None, ignored: int, outputs: list[int], generates: bool = False
    ) -> None:
        """Count an answered HTTP request, with the number of tokens of each of its choices."""
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
        """Return the number of requests to generate, and of their answers by class of status."""
        with self._lock:
            return {"received": self.received, **{name: self.totals[name] for name in STATUS_CLASSES}}
