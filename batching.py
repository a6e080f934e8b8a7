"""The batching loop: the bounded queue, the thread that drives the scheduler, and the completion of requests.

A handler enqueues an `Inference` and waits for it; one background thread drives the `Scheduler`. Every accepted
inference ends exactly once, with its text or with an `InferenceError`, whatever fails. This module must not know
HTTP, tensors, or which policy it runs.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as TooLate
from typing import Any

from scheduling.iteration import Iteration, Plan
from scheduling.options import values_of
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from serving.deadlines import Deadlines, Rate
from serving.inference import Inference, InferenceError, failure, outcome
from serving.recovery import EngineBroken, Model, Recovery

__all__ = ["MAX_BATCH_SIZE", "BatchingManager", "Inference", "InferenceError", "Model", "outcome"]

log = logging.getLogger(__name__)

MAX_BATCH_SIZE = 64
CLOSE_SECONDS = 1.0  # to end all requests after the loop has failed


Observer = Callable[[Iteration | None, list[Inference]], None]
Listener = Callable[[Inference], None]


class BatchingManager:
    """Queue, loop thread and answers for one model.

    The loop thread calls `observers` with each Iteration and the inferences that left. The caller's thread calls
    `listeners` with each accepted inference. Their exceptions are logged and ignored. `make_policy` returns the policies
    of the original's three loops by name. When the loop fails and all requests have ended, `on_death` is called with
    the reason, in the thread that detected the failure: a process without a loop should exit.
    """

    def __init__(
        self,
        model: Model,
        *,
        pages: PagePool | None = None,
        max_batch_size: int = MAX_BATCH_SIZE,
        max_queue: int = 1024,
        max_queue_tokens: float = math.inf,
        max_tokens_per_step: int = 2048,
        queue_timeout: float = math.inf,
        request_timeout: float = math.inf,
        make_policy: Callable[..., Policy] | None = None,
        make_inference: Callable[..., Inference] | None = None,
        on_death: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.recovery = Recovery(model, self._make_probe, clock)
        self.pages = pages
        self.max_batch_size = max_batch_size
        self.max_queue = max_queue
        self.max_queue_tokens = max_queue_tokens
        self.max_tokens_per_step = max_tokens_per_step
        self.queue_timeout = queue_timeout
        self.request_timeout = request_timeout
        self.observers: list[Observer] = []
        self.listeners: list[Listener] = []
        self.scheduler: Scheduler | None = None
        self.policy: Policy | None = None  # the active policy
        self.heartbeat = clock()  # time of the loop's last iteration
        self.failure: str | None = None  # why the loop has failed
        self._thread: threading.Thread | None = None
        self._on_death = on_death
        self._make_policy = make_policy
        self._make_inference = make_inference
        self._clock = clock
        self._wake = threading.Condition()
        self._arrived: list[Inference] = []
        self._cancelled: list[Inference] = []
        self._switches: deque[tuple[Policy, Future[None]]] = deque()
        self._open: dict[Sequence, Inference] = {}
        self._count = 0
        self._queued_tokens = 0  # of the prompts and answers in the queue
        self._rate = Rate()
        self._deadlines = Deadlines()
        self._stopping = False
        self._dead = False
        self._failing = threading.Lock()

    def enqueue(self, inference: Inference | str, num_tokens: int = 0, **options: Any) -> Inference:
        """Enqueue an inference, or a prompt as one; raise InferenceError when the queue is full or closed."""
        if isinstance(inference, str):
            if self._make_inference is None:
                raise TypeError("this manager takes Inference objects. Pass make_inference to take text")
            inference = self._make_inference(inference, num_tokens, **options)
        self.enqueue_all([inference])
        return inference

    def enqueue_all(self, inferences: list[Inference]) -> None:
        """Enqueue all of the inferences, or raise InferenceError and enqueue none."""
        for inference in inferences:
            self._check(inference)
        with self._wake:
            if self._dead or self._stopping:
                raise self._closed()
            limit = self.max_queue + self.max_batch_size
            if self._count + len(inferences) > limit:
                raise InferenceError(
                    "overloaded",
                    f"the server is full ({self._count} requests queued or running, this one adds "
                    f"{len(inferences)}, limit {limit}). Try again later, or raise --max-queue",
                    self.retry_after(),
                )
            tokens = sum(inference.sequence.total for inference in inferences)
            if self._queued_tokens and self._queued_tokens + tokens > self.max_queue_tokens:
                raise InferenceError(
                    "overloaded",
                    f"the queue holds {self._queued_tokens:,} tokens, this request has {tokens:,}, and the limit is "
                    f"{self.max_queue_tokens:,}. Try again later, or raise --max-queue-tokens",
                    self.retry_after(),
                )
            self._count += len(inferences)
            self._queued_tokens += tokens
        now = self._clock()
        for inference in inferences:
            inference._cancel = self._take_out
            inference._end_if_lost = self._end_if_lost
            inference.sequence.arrived_at = now
            if inference.slo_s is not None:
                inference.sequence.deadline = now + inference.slo_s
            self._notify_listeners(inference)  # not under the lock, which the loop needs
        with self._wake:
            if not self._dead:
                self._arrived += inferences
                self._wake.notify()
                return
        self._end_all(inferences)  # the loop ended meanwhile and never saw them

    def _notify_listeners(self, inference: Inference) -> None:
        for listener in self.listeners:
            try:
                listener(inference)
            except Exception:
                log.exception("an arrival callback failed")

    def _check(self, inference: Inference) -> None:
        """Reject a request that can never be computed, and hash its prompt for the prefix cache."""
        seq = inference.sequence
        fewest = 0 if inference.scores_prompt else 1
        if not seq.prompt_ids or inference.num_tokens < fewest:
            raise InferenceError(
                "invalid_request_error",
                f"prompt has {len(seq.prompt_ids)} tokens and num_tokens is {inference.num_tokens}, "
                "but both must be at least 1. Send a prompt and request a token",
            )
        if self.pages is None:
            return
        if not self.pages.can_ever_hold(seq.total):
            size, most = self.pages.page_size, self.pages.total
            raise InferenceError(
                "invalid_request_error",
                f"prompt and answer have {seq.total} tokens and need {self.pages.pages_for(seq.total)} KV pages of "
                f"{size} tokens, but there are {most}. Request fewer tokens or raise --kv-memory",
            )
        # A prompt to be scored must be computed, so its hash must match no cached page.
        seq.hashes = [uuid.uuid4().bytes] if inference.scores_prompt else self.pages.hashes(seq.prompt_ids)

    def retry_after(self) -> int:
        """Return the seconds after which a rejected client should retry: the time to compute the queue."""
        return max(1, min(60, math.ceil(self._rate.seconds_for(self._queued_tokens))))

    def waited(self, inference: Inference) -> dict[str, tuple[int, float]]:
        """Return the iterations and seconds that an inference has waited so far, by reason."""
        seq, scheduler = inference.sequence, self.scheduler
        return seq.waited if scheduler is None else scheduler.waited(seq, self._clock())

    @property
    def waiting(self) -> int:
        scheduler = self.scheduler
        return len(self._arrived) + (len(scheduler.waiting) if scheduler else 0)

    @property
    def running(self) -> int:
        return len(self.scheduler.running) if self.scheduler else 0

    @property
    def is_alive(self) -> bool:
        """Whether enqueued requests will be answered: the loop has not ended, but may not have started."""
        return not self._dead

    @property
    def has_thread(self) -> bool:
        """Whether the loop's thread is alive or has not been started yet."""
        return self._thread is None or self._thread.is_alive()

    @property
    def slot_cap(self) -> int:
        """The limit on running requests: the policy's slots, or fewer after memory ran out."""
        cap = self.max_batch_size if self.scheduler is None else self.scheduler.slot_cap
        return min(self.max_batch_size, cap)

    def _make_probe(self) -> Sequence:
        """Return a sequence of one token that belongs to no request."""
        if self._make_inference is None:
            return Sequence([0], 1)
        return self._make_inference("", 1, [0], seed=0).sequence

    def _take_out(self, inferences: list[Inference]) -> None:
        """Wake the loop to release the resources of these finished inferences."""
        with self._wake:
            self._cancelled += inferences
            self._wake.notify()

    def no_batching_loop(self) -> None:
        """Serve one request at a time, forever."""
        self.run(self._policy("nobatch"))

    def static_batching_loop(self) -> None:
        """Serve batches that start and end together, forever."""
        self.run(self._policy("static"))

    def dynamic_batching_loop(self) -> None:
        """Serve with iteration-level batching, forever."""
        self.run(self._policy("dynamic"))

    def _policy(self, name: str) -> Policy:
        if self._make_policy is None:
            raise TypeError("this manager has no make_policy. Pass one, for example policies.get_policy")
        return self._make_policy(name, max_batch_size=self.max_batch_size)

    def start(self, policy: Policy) -> threading.Thread:
        """Run the loop in a thread of its own."""
        self.policy = policy
        thread = threading.Thread(target=self.run, args=(policy,), name="batching-loop", daemon=True)
        thread.start()
        self._thread = thread
        return thread

    def switch(self, policy: Policy, timeout: float | None = None) -> None:
        """Switch to `policy` at the next iteration, and return after the switch.

        No request is lost: running requests finish, and queued requests enter the new policy's queue. Raise
        InferenceError, without a switch, when the loop has ended or completes no step within `timeout` seconds.
        """
        done: Future[None] = Future()
        with self._wake:
            if self._dead or self._stopping:
                raise self._closed()
            self._switches.append((policy, done))
            self._wake.notify()
        try:
            done.result(timeout)
        except TooLate:
            if done.cancel():
                raise InferenceError(
                    "timeout_error",
                    f"the current step has not ended within {timeout:g} s, so the policy is unchanged. Try again",
                ) from None
            done.result()

    @property
    def policy_name(self) -> str:
        """The name of the active policy, empty before the loop has one."""
        return self.policy.name if self.policy is not None else ""

    @property
    def policy_options(self) -> dict[str, Any]:
        """The policy's options and their values."""
        return values_of(self.policy) if self.policy is not None else {}

    def stop(self, patience: float | None = None) -> None:
        """Stop the loop; open requests end with an error.

        With `patience`, they end after at most that many seconds, even if the current step takes longer.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if patience is not None and self._thread is not None:
            self._thread.join(patience)
            self._close()

    def give_up(self, reason: str) -> None:
        """End all requests with an error because the loop failed, and call `on_death`; only the first call acts."""
        with self._failing:
            if self.failure is not None:
                return
            self.failure = reason
        # If the loop hangs while it holds the lock, the process must still exit.
        closing = threading.Thread(target=self._close, name="close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        self._on_death(reason)

    def run(self, policy: Policy) -> None:
        """Drive the scheduler until `stop`."""
        worked = True
        try:
            self.policy = policy
            self.scheduler = scheduler = Scheduler(policy, self.pages, self.max_tokens_per_step)
            while self._take_in(scheduler, wait=not worked):
                self._make_switches(scheduler)
                worked = self._turn(scheduler)
                if self.recovery.is_suspect:
                    self.recovery.probe()
        except BaseException as error:  # whatever it is, no request may wait for a loop that has ended
            log.critical("the batching loop failed; all open requests end with an error", exc_info=True)
            broken = isinstance(error, EngineBroken)
            self.give_up(str(error) if broken else f"the batching loop ended with {type(error).__name__}")
            if isinstance(error, KeyboardInterrupt):
                raise
        finally:
            self._close()

    def _take_in(self, scheduler: Scheduler, wait: bool) -> bool:
        """Pass arrivals and cancellations to the scheduler; return False to end the loop.

        With `wait`, sleep first, until there is something to do or the policy's next deadline.
        """
        with self._wake:
            self.heartbeat = now = self._clock()
            news = self._arrived or self._cancelled or self._switches or self._stopping
            if wait and not news:
                moments = (scheduler.wake_at(now), self._deadlines.next())
                wait_for = min((at - now for at in moments if at is not None), default=1.0)
                self._wake.wait(max(0.0, min(1.0, wait_for)))
                self.heartbeat = now = self._clock()
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
            for inference in arrived:
                self._open[inference.sequence] = inference
            if self._stopping:
                return False
        cancelled += [inference for inference in arrived if inference.is_finished]
        for inference in arrived:
            if not scheduler.add(inference.sequence):
                inference.sequence.error = InferenceError(
                    "overloaded", f"the policy {scheduler.policy.name} accepts no more requests "
                    "from this client for now. Try again later", 60,
                )  # fmt: skip
                self._leave([inference.sequence], None)
                continue
            self._deadlines.add(inference, self.queue_timeout, self.request_timeout)
        self._deadlines.forget(len(self._open))
        self._remove(scheduler, cancelled + self._deadlines.over(now), now)
        return True

    def _remove(self, scheduler: Scheduler, ended: list[Inference], now: float) -> None:
        """Remove inferences that ended before their last token from the scheduler, in one pass."""
        leaving: dict[str, dict[Sequence, None]] = {"length": {}, "abort": {}}
        for inference in ended:
            if inference.sequence in self._open:
                reason = "length" if inference.error is None else "abort"
                leaving[reason][inference.sequence] = None
        left = [s for reason, group in leaving.items() if group for s in scheduler.remove_all(list(group), now, reason)]
        if left:
            self._leave(left, None)

    def _make_switches(self, scheduler: Scheduler) -> None:
        """Apply the requested policy switches; the limit on queued and running requests stays the same."""
        while self._switches:
            policy, done = self._switches[0]
            if done.set_running_or_notify_cancel():
                self._leave(scheduler.switch(policy, self._clock()), None)
                with self._wake:
                    self.max_queue += self.max_batch_size - policy.max_batch_size
                    self.max_batch_size = policy.max_batch_size
                    self.policy = policy
                done.set_result(None)
            self._switches.popleft()

    def _turn(self, scheduler: Scheduler) -> bool:
        """Plan, compute and publish one step; return False when the policy schedules nothing."""
        plan = scheduler.plan(self._clock())
        if plan is None:
            return False
        if plan.joined:
            with self._wake:
                first_time = [s for s in plan.joined if s.first_iteration == plan.number]
                self._queued_tokens -= sum(seq.total for seq in first_time)
        plan, outputs = self.recovery.compute(scheduler, plan)
        iteration = scheduler.commit(plan, outputs, self._clock())
        self._rate.add(iteration.tokens, iteration.seconds)
        self._publish_tokens(plan)
        members = itertools.chain(plan.sequences, plan.held)
        self._leave([seq for seq in members if seq.state == "finished"], iteration)
        return True

    def _publish_tokens(self, plan: Plan) -> None:
        """Notify the readers of streams about new tokens; `_leave` notifies those that end."""
        for seq in plan.sequences:
            inference = self._open.get(seq)
            if inference is not None and inference.wakeup is not None and not seq.is_finished:
                try:
                    inference.publish_tokens()
                except Exception as error:
                    log.exception("cannot notify the reader of a stream")
                    inference.cancel(failure(error))

    def _leave(self, sequences: list[Sequence], iteration: Iteration | None) -> None:
        """Complete the requests of these sequences, in one pass and without blocking."""
        inferences = [self._open.pop(seq) for seq in sequences if seq in self._open]
        never_begun = sum(seq.total for seq in sequences if seq.scheduled_at is None)
        with self._wake:
            self._count -= len(inferences)
            self._queued_tokens -= never_begun
        self._tell(iteration, inferences)
        self._finish(inferences)

    def _finish(self, inferences: list[Inference]) -> None:
        """Complete each inference; a failure of one does not affect the others."""
        for inference in inferences:
            try:
                inference.finished(failure(inference.sequence.error))
            except Exception:
                log.exception("cannot complete an inference")

    def _end_if_lost(self, inference: Inference) -> None:
        """Complete an inference that the loop no longer tracks; waiting readers call this about every second."""
        if self._dead:
            inference.finished(failure(inference.sequence.error) or self._closed())
        elif inference.sequence.state == "finished" and inference.sequence not in self._open:
            if inference.is_overdue:
                log.error("the completion of a request was lost, and has been recovered")
                inference.finished(failure(inference.sequence.error))
            inference.is_overdue = True

    def _closed(self) -> InferenceError:
        """Return the error for requests that arrive after the loop ended."""
        if self.failure is None:
            return InferenceError("unavailable_error", "the server is shutting down. Try again later", 1)
        return InferenceError("unavailable_error", f"the engine failed and is restarting: {self.failure}. Try again", 5)

    def _tell(self, iteration: Iteration | None, left: list[Inference]) -> None:
        for observer in self.observers:
            try:
                observer(iteration, left)
            except Exception:
                log.exception("an observer failed")

    def _close(self) -> None:
        with self._wake:
            self._dead = True
            open_, self._open = [*self._open.values(), *self._arrived], {}
            self._arrived = []
            self._count = self._queued_tokens = 0
        for _, done in self._switches:
            with contextlib.suppress(InvalidStateError):  # its caller has timed out
                done.set_exception(
                    InferenceError("unavailable_error", "the server stopped before it could switch the policy", 1)
                )
        self._end_all(open_)

    def _end_all(self, inferences: list[Inference]) -> None:
        """End these inferences with the reason why the loop ended."""
        for inference in inferences:
            inference.sequence.error = inference.sequence.error or self._closed()
        self._tell(None, inferences)
        self._finish(inferences)
