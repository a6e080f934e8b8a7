"""The inbox of the batching loop: the bounded queue through which all other threads communicate with it.

This module must not know HTTP, tensors, or how requests are scheduled.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as TooLate

from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.sequence import Sequence
from serving.deadlines import Rate
from serving.fallback import Lease
from serving.inference import Inference, InferenceError
from serving.places import Places

MAX_RETRY_SECONDS = 60


class Inbox:
    """A bounded queue of inferences for one loop: at most `limit` queued or running, with `max_tokens` queued tokens.

    Any thread may check, reserve and deliver inferences, remove ended ones, switch the policy, stop and close. Only the
    loop's thread calls wait, take, switch_policies, start and finish, between two steps. While the lock is held, only that
    of `places` is taken, and nothing else is called; that of `Dedup` is taken before it. `changed` is that lock, on which a
    model waits, too, that computes elsewhere. `failure`, the reason why the
    loop failed, is set before `close` and without the lock: the loop may hang while it holds the lock.
    """

    def __init__(
        self,
        limit: int,
        max_tokens: float = math.inf,
        pages: PagePool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        # An HTTP request takes its places before its body is read, and keeps them until its last byte is sent. For all
        # others `reserve` takes them.
        self.places = Places(limit)
        self.max_tokens = max_tokens
        self.heartbeat = clock()  # time of the loop's last iteration
        self.rate = Rate()  # of the loop's work
        self.failure: str | None = None
        self.is_stopping = False
        self.is_closed = False
        self.has_news = False  # something for `take`, or another policy
        self.arrived: list[Inference] = []
        # The inferences that the loop has taken and not finished. Its thread reads them without the lock, because only
        # `close` changes them in another thread.
        self.open: dict[Sequence, Inference] = {}
        self.streams: dict[Sequence, Inference] = {}  # of these, those whose readers follow their tokens
        self._switches: deque[tuple[Policy | None, Lease | None, Future[None]]] = deque()
        self._ended: list[Inference] = []  # by their callers or deadlines
        self.queued_tokens = 0  # of the prompts and answers in the queue
        self._pages = pages
        self.changed = threading.Condition()

    @property
    def prompt_tokens(self) -> int:
        """The prompt tokens of queued and running requests that are not computed yet."""
        sequences = [*self.open, *(inference.sequence for inference in self.arrived)]
        return sum(max(0, len(seq.prompt_ids) - seq.computed) for seq in sequences)

    @property
    def is_urgent(self) -> bool:
        """Whether the loop must act although no slot may be free: a request ended early, or the policy or all shall change."""
        return bool(self._ended or self._switches or self.is_stopping or self.is_closed)

    def check(self, inference: Inference) -> None:
        """Reject an inference that can never be computed, and hash its prompt for the prefix cache."""
        seq, pages = inference.sequence, self._pages
        if not seq.prompt_ids or inference.num_tokens < inference.fewest_tokens:
            raise InferenceError(
                "invalid_request_error",
                f"prompt has {len(seq.prompt_ids)} tokens and num_tokens is {inference.num_tokens}, "
                "but both must be at least 1. Send a prompt and request a token",
            )
        if pages is None:
            return
        if not pages.can_ever_hold(seq.total):
            raise InferenceError(
                "invalid_request_error",
                f"prompt and answer have {seq.total} tokens and need {pages.pages_for(seq.total)} KV pages of "
                f"{pages.page_size} tokens, but there are {pages.total}. Request fewer tokens or raise --kv-memory",
            )
        # A prompt to be scored must be computed, so its hash must match no cached page.
        seq.hashes = [uuid.uuid4().bytes] if inference.scores_prompt else pages.hashes(seq.prompt_ids, seq.cache_salt)

    def reserve(self, inferences: list[Inference]) -> None:
        """Reserve room for all of the inferences, or raise InferenceError and reserve none."""
        count = sum([inference.places for inference in inferences])
        tokens = sum([inference.queue_tokens for inference in inferences])
        with self.changed:
            if self.is_closed or self.is_stopping:
                raise self.closed_error()
            if self.queued_tokens and self.queued_tokens + tokens > self.max_tokens:
                raise InferenceError(
                    "overloaded",
                    f"the queue holds {self.queued_tokens:,} tokens, this request has {tokens:,}, and the limit is "
                    f"{self.max_tokens:,}. Try again later, or raise --max-queue-tokens",
                    self.retry_after(),
                )
            # Last, because nothing may fail after it: from here on `deliver`, `close` or `finish` gives the places back.
            if count and not self.places.take(count):
                raise self.full_error(count)
            self.queued_tokens += tokens

    def deliver(self, inferences: list[Inference]) -> bool:
        """Pass inferences that have their room to the loop; return False when the loop has ended."""
        with self.changed:
            if self.is_closed:
                self._give_back(inferences)  # `close` has not seen them
                return False
            self.arrived += inferences
            self._tell()
            return True

    def remove(self, ended: list[Inference]) -> None:
        """Have the loop release the slots and pages of these ended inferences."""
        with self.changed:
            self._ended += ended
            self._tell()

    def switch(self, policy: Policy | None, timeout: float | None = None, lease: Lease | None = None) -> None:
        """Have the loop switch to `policy`, or without one end a lease, before its next step, and return after the switch.

        With a lease, the policy before comes back when it ends. No request is lost: running requests finish, and queued
        requests enter the new policy's queue. Raise InferenceError, without a switch, when the loop has ended or completes
        no step within `timeout` seconds, when the policy fails at once, or when another has a lease. If it fails later, the
        loop goes back to the policy before.
        """
        done: Future[None] = Future()
        with self.changed:
            if self.is_closed or self.is_stopping:
                raise self.closed_error()
            self._switches.append((policy, lease, done))
            self._tell()
        try:
            done.result(timeout)
        except TooLate:
            if done.cancel():
                raise InferenceError(
                    "timeout_error",
                    f"the current step has not ended within {timeout:g} s, so the policy is unchanged. Try again",
                ) from None
            done.result()  # the loop is switching right now

    def _tell(self) -> None:
        self.has_news = True
        self.changed.notify()

    def stop(self) -> None:
        """Have the loop end before its next step."""
        with self.changed:
            self.is_stopping = True
            self.changed.notify()

    def close(self) -> list[Inference]:
        """Refuse everything from now on, and return the inferences that have not been finished."""
        with self.changed:
            self.is_closed = True
            unfinished, self.open, self.streams = [*self.open.values(), *self.arrived], {}, {}
            self.arrived = []
            self.queued_tokens = 0
            self._give_back(unfinished)
        for *_, done in self._switches:
            with contextlib.suppress(InvalidStateError):  # its caller has timed out
                done.set_exception(
                    InferenceError("unavailable_error", "the server stopped before it could switch the policy", 1)
                )
        return unfinished

    def wait(self, seconds: float) -> None:
        """Wait until there is something to do, but at most `seconds`; called by the loop when it is idle."""
        with self.changed:
            if not (self.arrived or self.is_urgent):
                self.changed.wait(seconds)

    def take(self) -> tuple[list[Inference], list[Inference]]:
        """Return the inferences that arrived and those that ended since the last call; called by the loop."""
        with self.changed:
            self.has_news = False
            arrived, self.arrived = self.arrived, []
            ended, self._ended = self._ended, []
            for inference in arrived:
                self.open[inference.sequence] = inference
                if inference.wakeup is not None and inference.first is None:
                    self.streams[inference.sequence] = inference
        return arrived, ended

    def switch_policies(self, switch: Callable[[Policy | None, Lease | None], None]) -> None:
        """Call `switch` with each policy to switch to; its caller gets the InferenceError that this raises."""
        while self._switches:
            policy, lease, done = self._switches[0]
            if done.set_running_or_notify_cancel():
                try:
                    switch(policy, lease)
                except InferenceError as error:
                    done.set_exception(error)
                else:
                    done.set_result(None)
            # Not earlier: if the loop fails in `switch`, `close` must still find the caller that waits.
            self._switches.popleft()

    def start(self, plan: Plan) -> None:
        """Record which sequences leave the queue for their first step; called by the loop."""
        new = [self.open[seq] for seq in plan.joined if seq.first_iteration == plan.number and seq in self.open]
        with self.changed:
            self.queued_tokens -= sum(inference.queue_tokens for inference in new)

    def finish(self, sequences: list[Sequence]) -> list[Inference]:
        """Free the room of sequences that left the scheduler, and return their inferences; called by the loop."""
        with self.changed:
            left = [self.open.pop(seq) for seq in sequences if seq in self.open]
            for inference in left:
                self.streams.pop(inference.sequence, None)
            self._give_back(left)
            self.queued_tokens -= sum(i.queue_tokens for i in left if i.sequence.scheduled_at is None)
        return left

    def _give_back(self, inferences: list[Inference]) -> None:
        """Give back the places of inferences that leave, except those that an HTTP request holds until its last byte."""
        if count := sum([inference.places for inference in inferences]):
            self.places.give_back(count)

    def has_lost(self, inference: Inference) -> bool:
        """Return whether the loop has finished an inference's sequence and no longer holds it."""
        return inference.sequence.state == "finished" and inference.sequence not in self.open

    def retry_after(self) -> int:
        """Return the seconds after which a rejected client should retry: the time to compute the queue."""
        return max(1, min(MAX_RETRY_SECONDS, math.ceil(self.rate.seconds_for(self.queued_tokens))))

    def full_error(self, n: int) -> InferenceError:
        """Return the error for a request that needs `n` places when fewer are left."""
        return InferenceError(
            "overloaded",
            f"the server is full ({self.places.taken} requests queued or running, this one adds {n}, "
            f"limit {self.places.limit}). Try again later, or raise --max-queue",
            self.retry_after(),
        )

    def closed_error(self) -> InferenceError:
        """Return the error for requests that arrive after the loop ended."""
        if self.failure is None:
            return InferenceError("unavailable_error", "the server is shutting down. Try again later", 1)
        return InferenceError("unavailable_error", f"the engine failed and is restarting: {self.failure}. Try again", 5)
