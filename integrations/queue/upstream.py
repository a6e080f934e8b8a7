"""The model of one upstream, a server that is not ours: its `forward` takes what the upstream has sent.

An upstream batches by itself, so its steps are not ours to plan. They are visible from outside: the tokens of one step
arrive within a few milliseconds, followed by a pause as long as the next step. Such a burst is a step here, with a row for
each request that got tokens. What remains to be decided is which request is let through, and when. If the upstream refuses
a request before the first byte, as an engine does whose memory is full, the request goes back to the head of the queue.

The loops' thread calls `forward`; the thread of the connections reports what arrived. Bytes never pass through here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import cast

from integrations.queue.sites import EVERYONE, Rest, Site
from routing.routers import RoutingKey
from scheduling.advance import Output, TokenRun
from scheduling.iteration import Plan
from scheduling.scheduler import Scheduler
from scheduling.sequence import UNKNOWN_TOKEN, Sequence
from serving.inference import Inference, InferenceError
from serving.loop import Loop

TOGETHER = 0.003  # seconds in which tokens arrive that were computed together
LOST = "the connection of this request was lost. Try again"


@dataclass(slots=True, eq=False)
class Turn:
    """A request. `begin` is called when it is let through, and `routing_key` is what routers know of it.

    The other fields hold what the upstream sent since the last step.
    """

    inference: Inference
    begin: Callable[[], None]
    routing_key: RoutingKey
    whose: str = EVERYONE  # its client's key and model, if a refusal may be due to them
    arrived: float = field(default_factory=time.monotonic)
    refused_at: float = inf  # first
    tried: set[str] = field(default_factory=set)  # the upstreams that failed it, which do not get it again
    at: Upstream = field(init=False)  # once it is let through; `where` is that upstream's name
    where: str = ""
    begun_at: float = 0.0  # when it was last let through
    rest: Rest | None = None  # that it ends, if the upstream takes it
    unread: int = 0  # tokens
    ended: str | None = None  # stop, length or abort, when its answer is complete
    error: InferenceError | None = None
    again: bool = False  # the upstream did not take it
    last: int = 0  # length of the whole answer, once known


class Upstream:
    """Lets requests through to one site, and reports their tokens to its loop as the outputs of steps.

    `due` is when the next step is: at once if a request has ended, whose slot must not wait for others' tokens. `numbers`
    are those of its slots, where other upstreams have others.
    """

    scheduler: Scheduler  # set with the loop
    loop: Loop

    def __init__(
        self, site: Site, turns: dict[Sequence, Turn], clock: Callable[[], float], numbers: range | None
    ) -> None:
        self.site, self.due, self.numbers = site, inf, numbers
        self._turns, self._clock = turns, clock
        self.open: Plan | None = None  # the last plan, if nothing came of it
        self._stepped = 0.0  # when the last step ended
        self.let_through = 0  # requests so far
        self.is_leaving = False  # it gets no more requests

    @property
    def slots(self) -> int:
        """How many requests it may have at once."""
        return 0 if self.is_leaving else self.site.slots

    def tell(self, turn: Turn) -> None:
        """Note that something came; the caller has the inbox's lock, unless it is the loops' thread."""
        self.due = min(self.due, 0.0 if turn.ended or turn.again else self._clock() + TOGETHER)

    def is_closed_to(self, seq: Sequence) -> bool:
        """Return whether a waiting request must not go to this site now, although others may."""
        if (turn := self._turns.get(seq)) is None:
            return False
        rest = self.site.rest_from(turn.whose)
        return self.site.name in turn.tried or (rest is not None and not rest.is_over)

    def forward(self, plan: Plan) -> list[Output]:
        """Send the requests that joined; if a step is due, put what arrived into `plan` and return its outputs.

        If no step is due or nothing arrived, the plan is `open`: the next one is of the same step.
        """
        # No step repeats, and how many tokens a request computes is not the policy's to say: those it pauses are computed.
        plan.repeats = False
        plan.sequences, plan.paused = plan.sequences + plan.paused, []
        plan.counts = [0] * len(plan.sequences)
        self.let_through += len(plan.joined)
        for seq in plan.joined:
            with self.loop.inbox.changed:
                if (turn := self._turns.get(seq)) is None:
                    continue
                turn.at, turn.where, turn.begun_at = self, self.site.name, self._clock()
                turn.rest = self.site.rest_from(turn.whose)
                if turn.rest is not None:
                    turn.rest.enter()
            turn.begin()
        if self.open is not None:
            still = set(plan.sequences)
            plan.joined = [seq for seq in self.open.joined if seq in still] + plan.joined
            plan.preempted, self.open = self.open.preempted + plan.preempted, None
        rows = self._taken(plan)
        if all(taken is not None and _is_nothing(seq, taken) for seq, taken in rows):
            plan.sequences, plan.counts, plan.paused, self.open = [], [], plan.sequences, plan
            return []
        began = min((seq.scheduled_at or 0.0 for seq in plan.sequences), default=0.0)
        now = self._clock()
        plan.started_at, self._stepped = max(began, self._stepped), now
        back = [seq for seq, taken in rows if taken is None]
        if back:
            self.scheduler.preempt(plan, back, now)
        # One that decodes and got nothing stands still, as one that the policy pauses; a prompt is being computed.
        running = plan.sequences
        kept = [(seq, *taken) for seq, taken in rows if taken is not None]
        done = [row for row in kept if not (row[0].output_ids and _is_nothing(row[0], row[1:]))]
        plan.sequences, plan.counts = [row[0] for row in done], [row[1] for row in done]
        plan.paused = [seq for seq in running if seq not in set(plan.sequences)]
        return [row[2] for row in done]

    def _taken(self, plan: Plan) -> list[tuple[Sequence, tuple[int, Output] | None]]:
        """Return what came for each request, nothing before a step is due."""
        with self.loop.inbox.changed:
            if self.due > self._clock():
                return []
            self.due = inf
            return [(seq, self._take(seq)) for seq in plan.sequences]

    def _take(self, seq: Sequence) -> tuple[int, Output] | None:
        """Return how many tokens of a request were computed, and its output; None if the upstream did not take it."""
        turn = self._turns.get(seq)
        if turn is None:
            return 0, InferenceError("server_error", LOST)
        if turn.again:
            turn.again = False
            return None
        if turn.error is not None:
            return 0, turn.error
        have, count = len(seq.output_ids), turn.unread
        if turn.ended is None:
            count = min(count, seq.max_tokens - 1 - have)  # only the upstream ends an answer
        elif not count:  # all of its tokens were reported before its end was seen
            seq.finish_reason, seq.state = turn.ended, "held"
            return 0, TokenRun([])
        elif not turn.last:
            turn.last = last = have + count
            seq.max_tokens, reason = max(seq.max_tokens, last), turn.ended
            seq.stop = lambda token: reason if len(seq.output_ids) >= last else None
        if count <= 0:
            return 0, TokenRun([])
        if have:
            turn.unread -= count
            # Nobody knows their ids, so they are taken in at once, however many they are.
            seq.output_ids += [UNKNOWN_TOKEN] * (count - 1)
            seq.new_tokens = count
            return count, UNKNOWN_TOKEN
        seq.new_tokens = 1
        turn.unread -= 1  # the first token comes with the prompt; what came beside it counts in the next step
        if turn.unread:
            self.tell(turn)
        return seq.pending, UNKNOWN_TOKEN


class UpstreamLoop(Loop):
    """The loop of an upstream, whose plan goes on with the next one while nothing comes."""

    def commit(self, plan: Plan, outputs: list[Output]) -> None:
        """See `Loop.commit`."""
        if cast(Upstream, self.recovery.model).open is plan:
            self.scheduler.number = plan.number - 1
        else:
            Loop.commit(self, plan, outputs)


def _is_nothing(seq: Sequence, taken: tuple[int, Output]) -> bool:
    return not taken[0] and isinstance(taken[1], TokenRun) and seq.finish_reason is None
