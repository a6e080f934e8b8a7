"""The manager of the batching loop: handlers enqueue an `Inference` and wait for it, one thread computes them all.

Every accepted inference ends exactly once, with its text or with an `InferenceError`, whatever fails. One iteration is
`Loop.step` (`serving/loop.py`). This module must not know HTTP, tensors, or which policy it runs.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Hashable
from types import FrameType
from typing import Any

from scheduling.options import values_of
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from scheduling.speculation import Speculator
from serving.deadlines import Deadlines
from serving.dedup import Dedup
from serving.fallback import Fallback
from serving.inbox import Inbox
from serving.inference import Inference, InferenceError, outcome
from serving.loop import Listener, Loop, Observer, complete, notify
from serving.recovery import EngineBroken, Model, Recovery

__all__ = ["MAX_BATCH_SIZE", "BatchingManager", "Inference", "InferenceError", "Model", "outcome"]

log = logging.getLogger(__name__)

MAX_BATCH_SIZE = 64
CLOSE_SECONDS = 1.0  # to end all requests after the loop has failed


class BatchingManager:
    """Queue, loop thread and answers for one model.

    The loop thread calls `observers` with each Iteration and the inferences that left, and before them, if any left,
    `on_leave`. The caller's thread calls `listeners` with each accepted inference, without a lock. Their exceptions are
    logged and ignored. `make_policy` returns the policies of the original's three loops by name. With `dedup`, inferences
    in flight for which it returns equal keys are computed once. When the loop fails and all requests have ended, `on_death`
    is called with the reason, in the thread that detected the failure: a process without a loop should exit.
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
        speculator: Speculator | None = None,
        make_policy: Callable[..., Policy] | None = None,
        make_inference: Callable[..., Inference] | None = None,
        on_death: Callable[[str], None] = lambda reason: None,
        dedup: Callable[[Inference], Hashable] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.pages = pages
        self.max_tokens_per_step = max_tokens_per_step
        self.deadlines = Deadlines(queue_timeout, request_timeout)
        self.inbox = Inbox(max_queue + max_batch_size, max_queue_tokens, pages, clock)
        self.dedup = None if dedup is None else Dedup(self.inbox, dedup)
        self.fallback = Fallback()
        self.recovery = Recovery(model, self._make_probe, clock)
        self.observers: list[Observer] = []
        self.on_leave: list[Observer] = []
        self.listeners: list[Listener] = []
        self.speculator = speculator
        self.scheduler: Scheduler | None = None
        self._first_policy: Policy | None = None
        self._max_batch_size = max_batch_size
        self._thread: threading.Thread | None = None
        self._on_death = on_death
        self._make_policy = make_policy
        self._make_inference = make_inference
        self._clock = clock
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
        now = self._clock()
        for inference in inferences:
            self.inbox.check(inference)
            inference.attach(self.inbox, now)
        (self.inbox if self.dedup is None else self.dedup).reserve(inferences)
        for inference in inferences:
            notify(self.listeners, inference)
        if not self.inbox.deliver(inferences):  # the loop ended meanwhile and never saw them
            self._end_all(inferences)

    def run(self, policy: Policy) -> None:
        """Run the loop with `policy` until `stop`."""
        try:
            step = self.assemble(policy)
            while step():
                pass
        except BaseException as error:  # whatever it is, no request may wait for a loop that has ended
            log.critical("the batching loop failed; all open requests end with an error", exc_info=True)
            broken = isinstance(error, EngineBroken)
            self.give_up(str(error) if broken else f"the batching loop ended with {type(error).__name__}")
            if isinstance(error, KeyboardInterrupt):
                raise
        finally:
            self._close()

    def assemble(self, policy: Policy) -> Callable[[], bool]:
        """Set `scheduler`; return what runs an iteration, and returns False to end the loop."""
        self.scheduler = Scheduler(policy, self.pages, self.max_tokens_per_step, speculator=self.speculator)
        return self.loop(self.scheduler, self.recovery).step

    def loop(self, scheduler: Scheduler, recovery: Recovery, kind: type[Loop] = Loop) -> Loop:
        """Return the loop of a scheduler."""
        return kind(
            scheduler, self.inbox, self.deadlines, recovery, self.observers, self.on_leave, self._clock, self.dedup,
            self.fallback,
        )  # fmt: skip

    def _end_all(self, inferences: list[Inference]) -> None:
        """End these inferences with the reason why the loop ended."""
        for inference in inferences:
            inference.sequence.error = inference.sequence.error or self.inbox.closed_error()
        notify(self.on_leave, None, inferences)
        notify(self.observers, None, inferences)
        complete(inferences)

    def start(self, policy: Policy) -> threading.Thread:
        """Run the loop in a thread of its own."""
        self._first_policy = policy
        thread = threading.Thread(target=self.run, args=(policy,), name="batching-loop", daemon=True)
        thread.start()
        self._thread = thread
        return thread

    def stop(self, patience: float | None = None) -> None:
        """Stop the loop; open requests end with an error.

        With `patience`, they end after at most that many seconds, even if the current step takes longer.
        """
        self.inbox.stop()
        if patience is not None and self._thread is not None:
            self._thread.join(patience)
            self._close()

    def give_up(self, reason: str) -> None:
        """End all requests with an error because the loop failed, and call `on_death`; only the first call acts."""
        with self._failing:
            if self.inbox.failure is not None:
                return
            self.inbox.failure = reason
        # If the loop hangs while it holds the lock, the process must still exit.
        closing = threading.Thread(target=self._close, name="close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        self._on_death(reason)

    def _close(self) -> None:
        self._end_all(self.inbox.close())

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

    def _make_probe(self) -> Sequence:
        """Return a sequence of one token that belongs to no request."""
        if self._make_inference is None:
            return Sequence([0], 1)
        return self._make_inference("", 1, [0], seed=0).sequence

    def waited(self, inference: Inference) -> dict[str, tuple[int, float]]:
        """Return the iterations and seconds that an inference has waited so far, by reason."""
        seq, scheduler = inference.sequence, self.scheduler
        return seq.waited if scheduler is None else scheduler.wait_clock.so_far(seq, self._clock())

    @property
    def policy(self) -> Policy | None:
        """The active policy, None before the loop has one."""
        return self._first_policy if self.scheduler is None else self.scheduler.policy

    @property
    def max_batch_size(self) -> int:
        """The slots of the active policy."""
        return self._slots(self._max_batch_size if self.policy is None else self.policy.max_batch_size)

    @property
    def slots(self) -> int:
        """The slots of all engines; the active policy may use fewer."""
        return self._slots(self._max_batch_size if self.policy is None else self.policy.slots)

    def _slots(self, most: int) -> int:
        return most if self.scheduler is None else self.scheduler.sharing.slots(most)

    @property
    def max_queue(self) -> int:
        """The number of requests that may wait while the batch is full."""
        return self.inbox.places.limit - self.max_batch_size

    @property
    def waiting(self) -> int:
        scheduler = self.scheduler
        return len(self.inbox.arrived) + (len(scheduler.waiting) if scheduler else 0)

    @property
    def running(self) -> int:
        return len(self.scheduler.sharing.running) if self.scheduler else 0

    @property
    def frame(self) -> FrameType | None:
        """What the loop's thread executes at this moment; None without a thread."""
        return None if self._thread is None else sys._current_frames().get(self._thread.ident or 0)

    @property
    def heartbeat(self) -> float:
        """The time of the loop's last iteration."""
        return self.inbox.heartbeat

    @property
    def is_alive(self) -> bool:
        """Whether enqueued requests will be answered: the loop has not ended, but may not have started."""
        return not self.inbox.is_closed

    @property
    def has_thread(self) -> bool:
        """Whether the loop's thread is alive or has not been started yet."""
        return self._thread is None or self._thread.is_alive()

    @property
    def slot_cap(self) -> int:
        """The limit on running requests: the policy's slots, or fewer after memory ran out."""
        if self.scheduler is None:
            return self.max_batch_size
        return sum(min(len(one.batch.slots), one.batch.slot_cap) for one in self.scheduler.sharing)

    @property
    def policy_name(self) -> str:
        """The name of the active policy, empty before the loop has one."""
        return self.policy.name if self.policy is not None else ""

    @property
    def policy_options(self) -> dict[str, Any]:
        """The policy's options and their values."""
        return values_of(self.policy) if self.policy is not None else {}
