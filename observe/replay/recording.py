"""What a server has just served, in bounded memory: requests, the time that steps of each size took, and the latest steps.

Simulations of other policies (`observe/replay/what_if.py`) begin with it. It watches every step of the loop, so it measures at most a hundred of them per second, and keeps equal steps as one (`scheduling/stretches.py`). Its failures
affect nothing else. It must not know HTTP, or what is simulated.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from costs.steps import Step, size, step_of_members
from scheduling.iteration import Iteration
from scheduling.stretches import Stretch, Stretches
from serving.inference import Inference, outcome

log = logging.getLogger(__name__)

MAX_REQUESTS = 1000
MAX_STRETCHES = 2000  # a load of 400 requests has about 1,200
MAX_AGE = 600.0  # seconds since a request arrived
STEPS_PER_SIZE = 128  # the latest of each size: a quiet hour must not push out the cost of a full batch
MEASURE_EVERY = 0.01  # seconds between two steps that are measured, of those that begin a request and of the others


class Served(NamedTuple):
    """A request that has left; `latency` is None unless its answer is complete. `alone`: it found the server idle.

    `drafts`: of each step in which it had some, the place in its answer, how many they were, and how many were accepted.
    `waited`: seconds until it joined the batch. `constrained`: its answer followed a grammar. `after`: the ids of its parents
    in its program.
    """

    id: str
    at: float
    prompt: int
    tokens: int
    latency: float | None
    client: str
    priority: int
    deadline: float | None
    open_ended: bool
    limit: int
    alone: bool
    hashes: list[bytes]
    drafts: Sequence[tuple[int, int, int]] = ()
    waited: float = 0.0
    constrained: bool = False
    program: str = ""
    after: tuple[str, ...] = ()


class Recording:
    """The latest requests and steps of a server, as far as one policy served them.

    `padded` returns whether the active policy computes padding.
    """

    def __init__(
        self, padded: Callable[[], bool] = lambda: False, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.policy = ""  # that made the latest step
        self._padded = padded
        self._clock = clock
        self._since = -1.0  # requests that arrived earlier are left out
        # Arrival, whether the server was idle, and the steps with drafts by the number of tokens before these.
        self._open: dict[str, tuple[float, bool, list[tuple[int, int, int]]]] = {}
        self._constrained: dict[str, int] = {}  # prompt tokens of the open requests whose answers follow a grammar
        self._done: deque[Served] = deque()
        self._steps: defaultdict[tuple[bool, int], deque[tuple[Step, float]]] = defaultdict(
            partial(deque, maxlen=STEPS_PER_SIZE)
        )
        self._measured = {True: -1.0, False: -1.0}  # when, by whether requests joined in the step
        self._stretches = Stretches(MAX_STRETCHES)
        self._gaps: deque[float] = deque(maxlen=STEPS_PER_SIZE)
        # When the last step of each engine ended in which requests stayed; by its rows.
        self._ended: dict[tuple[int, int] | None, float] = {}
        self._is_blind = False

    def on_arrival(self, inference: Inference) -> None:
        """Record an arrival; called in the handlers' threads, one at a time. Copies and background work are left out."""
        if inference.first is not None or self._is_blind:
            return
        if inference.sequence.constrained:
            self._constrained[inference.id] = len(inference.sequence.prompt_ids)
        if inference.is_background:
            return
        self._open[inference.id] = (inference.sequence.arrived_at, not self._open, [])

    def observe(self, iteration: Iteration | None, left: list[Inference]) -> None:
        """Record a step and the requests that left; called in the loop's thread."""
        if self._is_blind:
            return
        try:
            if iteration is not None:
                self._step(iteration)
            for inference in left:
                self._constrained.pop(inference.id, None)
                if inference.id in self._open:
                    self._depart(inference)
        except Exception:
            self._is_blind = True
            self._open.clear()  # nothing would remove them any more
            self._constrained.clear()
            log.exception("the recording for simulations cannot read a record and stops")

    def restart(self, now: float) -> None:
        """Leave out the requests that arrived before now; called in the loop's thread."""
        self._since = now
        self._done.clear()
        self._stretches.kept.clear()

    def _step(self, iteration: Iteration) -> None:
        if iteration.policy != self.policy:  # another policy served the requests before
            if self.policy:
                self.restart(iteration.t)
            self.policy = iteration.policy
        if (ended := self._ended.pop(iteration.rows, None)) is not None:
            self._gaps.append(max(0.0, iteration.t - ended))
        if len(iteration.members.shared.id) > len(iteration.left):
            self._ended[iteration.rows] = iteration.t + iteration.seconds
        self._stretches.add(iteration)
        if iteration.drafts:
            computed = {member.id: member.computed for member in iteration.members}
            for id, drafted, accepted in iteration.drafts:
                if id in self._open:
                    self._open[id][2].append((computed[id] - accepted, drafted, accepted))
        begins = bool(iteration.joined)
        if iteration.t - self._measured[begins] >= MEASURE_EVERY or iteration.t < self._measured[begins]:
            self._measured[begins] = iteration.t
            step = step_of_members(iteration.members, self._padded(), self._constrained)
            if any(kind := size(step)) and iteration.seconds > 0:
                self._steps[kind].append((step, iteration.seconds))

    def _depart(self, inference: Inference) -> None:
        arrived, alone, drafts = self._open.pop(inference.id)
        seq = inference.sequence
        complete = outcome(inference) in ("stop", "length") and seq.finished_at is not None
        # An embedding takes the steps of an answer of one token, which is drawn when the prompt is complete.
        tokens = len(seq.output_ids) or int(complete and seq.max_tokens == 0)
        if not tokens or arrived <= self._since:
            return
        latency = seq.finished_at - arrived if complete and seq.finished_at is not None else None
        if len(self._done) >= MAX_REQUESTS:
            # Requests are dropped in the order of their end: some that arrived before this one may be missing.
            self._since = max(self._since, self._done.popleft().at)
        self._done.append(
            Served(
                inference.id, arrived, len(seq.prompt_ids), tokens, latency, seq.client, seq.priority,
                seq.deadline, seq.open_ended, seq.max_tokens, alone, seq.hashes,
                [(at - len(seq.prompt_ids), drafted, accepted) for at, drafted, accepted in drafts],
                (seq.scheduled_at or arrived) - arrived, seq.constrained, seq.program,
                inference.call.after if inference.call is not None else (),
            )
        )  # fmt: skip

    def arrived(self, first: float = -1.0, last: float = float("inf")) -> list[Served]:
        """Return the requests that arrived in this span, in order of arrival, up to the oldest one that is still open."""
        since, end = max(self._since, self._clock() - MAX_AGE), self.oldest_open()
        seen = (one for one in self._done.copy() if since < one.at < end and first <= one.at <= last)
        return sorted(seen, key=lambda one: one.at)

    def oldest_open(self) -> float:
        """Return when the oldest request that is still open arrived; infinity if none is."""
        return min((arrived for arrived, *_ in self._open.copy().values()), default=float("inf"))

    def find(self, id: str) -> Served | None:
        """Return a request that has left, while it is remembered."""
        return next((one for one in self._done.copy() if one.id == id), None)

    def steps(self) -> list[tuple[Step, float]]:
        """Return the measured steps with their seconds."""
        return [row for steps in list(self._steps.values()) for row in steps.copy()]

    def stretches(self, first: float, last: float) -> list[Stretch]:
        """Return the steps that ended after `first` and began before `last`."""
        return [s for s in self._stretches.kept.copy() if s.ended > first and s.t < last]

    def mean_gap(self) -> float:
        """Return the mean time in seconds between two steps."""
        gaps = self._gaps.copy()
        return sum(gaps) / len(gaps) if gaps else 0.0
