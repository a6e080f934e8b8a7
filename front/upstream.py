"""The model of a queue in front of servers that are not ours: its `forward` waits for what an upstream has sent.

An upstream batches by itself, so its steps are not ours to plan. They can be seen from outside: the tokens of one step
arrive within a few milliseconds, then there is a pause as long as the next step. `forward` returns after each such
burst, so a step here is a step of one upstream, with as many rows as got tokens. What is left to decide is who is let through, and
when. An upstream that refuses a request before its first byte is one whose memory is full: the request goes back to the
head of the queue.

The loop's thread calls `forward`; the thread of the connections calls the rest. Bytes never pass through here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from batching import BatchingManager
from scheduling.advance import Output, TokenRun
from scheduling.iteration import Plan
from scheduling.sequence import UNKNOWN_TOKEN, Sequence
from serving.inference import Inference, InferenceError

TOGETHER = 0.003  # seconds in which tokens arrive that were computed together
BEAT = 0.25  # seconds after which the loop looks for deadlines even if nothing came
LOST = "the connection of this request was lost. Try again"


class Turn:
    """A request: `begin` is called when it is let through; the rest is what came from the upstream since the last look."""

    __slots__ = ("again", "begin", "ended", "error", "inference", "last", "unread", "where")

    def __init__(self, inference: Inference, begin: Callable[[], None]) -> None:
        self.inference, self.begin = inference, begin
        self.where = ""  # the upstream that it is at
        self.unread = 0  # tokens
        self.ended: str | None = None  # stop, length or abort, when its answer is complete
        self.error: InferenceError | None = None
        self.again = False  # the upstream did not take it
        self.last = 0  # length of its whole answer, once that is known


class Upstream:
    """Lets requests through, and reports their tokens to the loop as the outputs of steps."""

    manager: BatchingManager  # set by the composition root

    def __init__(self, clock: Callable[[], float] = time.perf_counter, together: float = TOGETHER) -> None:
        self._clock, self._together = clock, together
        self._turns: dict[Sequence, Turn] = {}
        self._news: dict[Sequence, None] = {}
        self._has_ended = False  # one of the news is an end: its slot must not wait for the others' tokens
        self._open: Plan | None = None  # the last plan, if nothing came of it
        self._stepped: dict[str, float] = {}  # when the last step of each upstream ended

    def expect(self, turn: Turn) -> None:
        """Know a request before it is queued."""
        self._turns[turn.inference.sequence] = turn

    def forget(self, turn: Turn) -> None:
        """Forget a request that has ended."""
        self._turns.pop(turn.inference.sequence, None)

    def tokens(self, turn: Turn, count: int) -> None:
        """Note that tokens of a request have passed."""
        with self.manager.inbox.changed:
            turn.unread += count
            self._tell(turn)

    def end(self, turn: Turn, reason: str, error: InferenceError | None = None) -> None:
        """Note that a request's answer is complete, or that it failed."""
        with self.manager.inbox.changed:
            turn.ended, turn.error, self._has_ended = reason, error, True
            self._tell(turn)

    def refuse(self, turn: Turn) -> None:
        """Note that the upstream did not take a request: it goes back to the head of the queue."""
        with self.manager.inbox.changed:
            turn.again = self._has_ended = True
            self._tell(turn)

    def limit(self, most: int) -> None:
        """Let at most this many through from now on."""
        if (scheduler := self.manager.scheduler) is not None:
            with self.manager.inbox.changed:
                scheduler.slot_cap = most
                self.manager.inbox.changed.notify()

    def _tell(self, turn: Turn) -> None:
        self._news[turn.inference.sequence] = None
        self.manager.inbox.changed.notify()

    def forward(self, plan: Plan) -> list[Output]:
        """Let the requests that joined through; return what came, once something has, and let `plan` say so.

        If there is something to decide before anything came, the plan goes on with the next one.
        """
        # No step repeats, and how many tokens a request computes is not the policy's to say: those it pauses are computed.
        plan.repeats = False
        plan.sequences, plan.paused = plan.sequences + plan.paused, []
        plan.counts = [0] * len(plan.sequences)
        for seq in plan.joined:
            if (turn := self._turns.get(seq)) is not None:
                turn.begin()
        if self._open is not None:
            still = set(plan.sequences)
            plan.joined = [seq for seq in self._open.joined if seq in still] + plan.joined
            plan.preempted, self._open = self._open.preempted + plan.preempted, None
        self._wait()
        with self.manager.inbox.changed:
            where, here = self._first(plan)
            others = {seq: self._turns[seq] for seq in set(plan.sequences).difference(here)}
            self._news = {seq: None for seq in self._news if seq in others}
            self._has_ended = any(others[seq].ended for seq in self._news)
            rows = [(seq, self._take(seq)) for seq in here]
        if all(taken is not None and _is_nothing(seq, taken) for seq, taken in rows):
            plan.goes_on, self._open = True, plan
            return []
        began = min((seq.scheduled_at or 0.0 for seq in here), default=0.0)
        now = self._clock()
        plan.started_at, self._stepped[where] = max(began, self._stepped.get(where, 0.0)), now
        back = [seq for seq, taken in rows if taken is None]
        if back:
            assert self.manager.scheduler is not None
            self.manager.scheduler.preempt(plan, back, now)
        # One that decodes and got nothing stands still, as one that the policy pauses; a prompt is being computed.
        running = plan.sequences
        kept = [(seq, *taken) for seq, taken in rows if taken is not None]
        done = [row for row in kept if not (row[0].output_ids and _is_nothing(row[0], row[1:]))]
        plan.sequences, plan.counts = [row[0] for row in done], [row[1] for row in done]
        plan.paused = [seq for seq in running if seq not in set(plan.sequences)]
        return [row[2] for row in done]

    def _wait(self) -> None:
        """Wait for the first news and for what belongs to it, or for something that the scheduler must decide at once."""
        changed = self.manager.inbox.changed
        with changed:
            end = self._clock() + BEAT
            while not self._news and not self._is_wanted() and self._clock() < end:
                changed.wait(max(0.0, end - self._clock()))
            end = self._clock() + self._together
            while self._news and not self._has_ended and self._clock() < end:
                changed.wait(max(0.0, end - self._clock()))

    def _first(self, plan: Plan) -> tuple[str, list[Sequence]]:
        """Return the upstream whose news came first, and the requests that are there, or nowhere any more.

        Upstreams do not step together: a step is of one of them.
        """
        turns = {seq: self._turns.get(seq) for seq in plan.sequences}
        where = next((turn.where for turn in map(turns.get, self._news) if turn is not None), "")
        return where, [seq for seq, turn in turns.items() if turn is None or turn.where == where]

    def _is_wanted(self) -> bool:
        inbox, scheduler = self.manager.inbox, self.manager.scheduler
        assert scheduler is not None
        may_join = scheduler.batch.free_slots > 0
        return inbox.is_urgent or (bool(inbox.arrived) and (may_join or scheduler.hooks.refuses))

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
            return count, TokenRun([UNKNOWN_TOKEN] * count)
        turn.unread -= 1  # the first token comes with the prompt; what came beside it counts in the next step
        if turn.unread:
            self._news[seq] = None
        return seq.pending, UNKNOWN_TOKEN


def _is_nothing(seq: Sequence, taken: tuple[int, Output]) -> bool:
    return not taken[0] and isinstance(taken[1], TokenRun) and seq.finish_reason is None
