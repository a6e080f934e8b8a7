"""Recovery from failed steps: find the request at fault and continue with the others, or give up on the engine.

A step changes no state until it is committed, so it can be retried as a whole, in halves, or with fewer requests. Only
the loop's thread calls this. This module must not know HTTP, tensors, or how an inference is completed.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from scheduling.iteration import Plan
from scheduling.scheduler import Output, Scheduler, Token
from scheduling.sequence import Sequence
from serving.headroom import NO_MEMORY, NoHeadroom, check_headroom
from serving.inference import InferenceError

log = logging.getLogger(__name__)

# The engine is at fault when this many steps fail for all requests and for the probe, within this many seconds.
MAX_PROBE_FAILURES = 3
PROBE_FAILURE_SECONDS = 60.0
RETRY_PAUSE_SECONDS = 0.1  # before such a step is retried
# The last two phrases are oneDNN's. Every shape was computed before, so only memory can be missing.
OUT_OF_MEMORY_PHRASES = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory",
             "alloc_failed", "could not create a primitive", "could not create a memory")  # fmt: skip
FATAL_PHRASES = ("device-side assert", "illegal memory access", "illegal instruction", "misaligned address",
                 "unspecified launch failure", "uncorrectable ecc", "cuda error: unknown error", "launch timed out",
                 "hardware stack error", "invalid program counter", "nvlink")  # fmt: skip

DEVICE_PHRASES = ("cuda error", "[cuda]", "cublas", "cudnn", *FATAL_PHRASES)  # Triton writes "Triton Error [CUDA]"


class Model(Protocol):
    """Computes a step: `generate.runner.ModelRunner`, or a mock that only sleeps.

    Its `release_memory()`, if it has one, is called when memory runs out.
    """

    def forward(self, plan: Plan) -> list[Output]: ...


class EngineBroken(Exception):
    """This process can no longer compute anything. The message may be shown to clients."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, whichever library raised it."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in OUT_OF_MEMORY_PHRASES)


def is_fatal(error: BaseException) -> bool:
    """Return whether only a new process can compute after this error, as after a CUDA assertion."""
    if isinstance(error, SystemError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in FATAL_PHRASES)


def blames_kernels(error: BaseException | None) -> bool:
    """Return whether a GPU failed for a reason other than memory, so that a process without fast kernels may succeed."""
    has_phrase = any(phrase in str(error).lower() for phrase in DEVICE_PHRASES)
    is_of_device = isinstance(error, RuntimeError) and has_phrase and not is_out_of_memory(error)
    return is_of_device and os.environ.get("EB_KERNELS") != "off"


class Recovery:
    """Computes plans and recovers from errors.

    `make_probe` returns a sequence of one token that belongs to no request. `is_suspect` is true from the first
    failure until this token has been computed. `fatal` is the device's error that ended it.
    """

    def __init__(
        self,
        model: Model,
        make_probe: Callable[[], Sequence],
        clock: Callable[[], float],
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.model = model
        self.is_suspect = False
        self.steps_failed = 0
        self.steps_retried = 0
        self.out_of_memory = 0
        self.fatal: BaseException | None = None
        self._ran_out_with = 0  # requests, since when a warning is due
        self._mask_seconds = 0.0  # of all tries of a step, whole and in parts
        self._make_probe = make_probe
        self._clock = clock
        self._pause = pause
        self._probe_failures: deque[float] = deque()

    def compute(self, scheduler: Scheduler, plan: Plan) -> list[Output]:
        """Return the outputs of a plan; the output of a request at fault is its error.

        Requests that do not fit into memory are removed from the plan and wait again. Raise EngineBroken when nothing
        can be computed.
        """
        self._mask_seconds = 0.0
        while True:
            try:
                check_headroom()
                outputs = self._compute(plan)
                plan.mask_seconds = self._mask_seconds
                if self._ran_out_with and not plan.paused:  # all that run fit: the limit is final
                    self._warn_of_limit(scheduler)
                return outputs
            except Exception as error:
                log.exception("step %d failed with %d requests in it", plan.number, len(plan.sequences))
                self._raise_if_fatal(error)
                out_of_memory = is_out_of_memory(error)
                self.is_suspect |= not isinstance(error, NoHeadroom)  # without memory the engine did not even try
            self.steps_failed += 1
            self.out_of_memory += out_of_memory
            alone = len(plan.sequences) < 2
            plan.stand_alone()
            outputs = self._shrink(scheduler, plan) if out_of_memory else self._bisect(plan, failed_alone=alone)
            plan.mask_seconds = self._mask_seconds
            has_result = not all(isinstance(output, BaseException) for output in outputs)
            if has_result or not self.is_suspect or self.probe():
                return outputs
            self._pause(RETRY_PAUSE_SECONDS)

    def probe(self) -> bool:
        """Compute the probe token; return whether that succeeded. Raise EngineBroken after too many failures."""
        try:
            probe = self._make_probe()
            probe.pages = [0]  # the page of padding
            token = self._compute(Plan(0, self._clock(), [probe], [probe.pending]))[0]
            if isinstance(token, BaseException):
                raise token
            if not isinstance(token, int | Token):
                raise RuntimeError("the model returned no token where one was expected")
            self.is_suspect = False
        except Exception as error:
            log.exception("the probe step failed as well")
            self._raise_if_fatal(error)
            self.is_suspect = True
            self._count_probe_failure(error)
        return not self.is_suspect

    def _raise_if_fatal(self, error: BaseException) -> None:
        if is_fatal(error):
            self.fatal = error
            raise EngineBroken("the device is in a state that only a new process can recover from") from error

    def _count_probe_failure(self, error: BaseException) -> None:
        now = self._clock()
        self._probe_failures.append(now)
        while now - self._probe_failures[0] > PROBE_FAILURE_SECONDS:
            self._probe_failures.popleft()
        if "cuda error" in str(error).lower():
            self.fatal = error
            raise EngineBroken("the device no longer computes") from error
        if len(self._probe_failures) >= MAX_PROBE_FAILURES:
            raise EngineBroken(
                f"{MAX_PROBE_FAILURES} steps within {PROBE_FAILURE_SECONDS:g} s failed for all requests, the last with "
                f"{type(error).__name__}, and no single request was at fault"
            ) from error

    def _compute(self, plan: Plan) -> list[Output]:
        plan.mask_seconds = 0.0
        try:
            outputs = self.model.forward(plan)
        finally:  # a try that failed has waited, too
            self._mask_seconds += plan.mask_seconds
        if len(outputs) != len(plan.sequences):
            raise RuntimeError(f"{len(outputs)} outputs for {len(plan.sequences)} sequences")
        return outputs

    def _try(self, plan: Plan) -> list[Output] | Exception:
        """Return the outputs, or the error without its traceback, which would keep tensors alive."""
        self.steps_retried += 1
        try:
            check_headroom()
            return self._compute(plan)
        except Exception as error:
            self._raise_if_fatal(error)
            error.__context__ = error.__cause__ = None
            return error.with_traceback(None)

    def _bisect(self, plan: Plan, failed_alone: bool = False) -> list[Output]:
        """Retry the whole step, since the fault may have been transient, then halves until each culprit is alone.

        About 2 log2 n steps find one of n. A request that is alone must fail twice, as its fault may be transient too.
        """
        n = len(plan.sequences)
        result = self._try(plan)
        if isinstance(result, Exception) and n == 1 and not failed_alone:
            result = self._try(plan)
        if not isinstance(result, Exception):
            return result
        if n < 2:
            return [_request_error(result)] * n
        halves = (slice(0, n // 2), slice(n // 2, n))
        return [output for half in halves for output in self._bisect(plan.part(half))]

    def _shrink(self, scheduler: Scheduler, plan: Plan) -> list[Output]:
        """Compute the oldest requests that fit into memory together; the others wait again, and fewer run from then on.

        About log2 n steps find how many fit. A request that does not even fit alone fails, and lowers no limit.
        """
        running, n = len(scheduler.running), len(plan.sequences)
        fits, too_many, size = 0, n + 1, n
        outputs: list[Output] = []
        while too_many - fits > 1:
            self._release_memory()
            result = self._try(plan if size == n else plan.part(slice(size)))
            if not isinstance(result, Exception):
                fits, outputs = size, result
            elif is_out_of_memory(result):
                self.out_of_memory += 1
                too_many = size
            else:
                scheduler.preempt(plan, plan.sequences[size:], self._clock())
                return self._bisect(plan)
            size = (fits + too_many) // 2
        if fits == n:
            return outputs
        alone = self._try(plan.part(slice(fits, fits + 1))) if fits else result
        if isinstance(alone, Exception):
            scheduler.preempt(plan, plan.sequences[fits + 1 :], self._clock())
            return [*outputs, _request_error(alone)]
        scheduler.preempt(plan, plan.sequences[fits:], self._clock())
        scheduler.batch.slot_cap = len(scheduler.running) - len(plan.held)  # which have all their tokens
        self._ran_out_with = self._ran_out_with or running
        return outputs

    def _warn_of_limit(self, scheduler: Scheduler) -> None:
        log.warning(
            "memory ran out with %d running requests; the limit is now %d. Start with --max-batch-size %d",
            self._ran_out_with, scheduler.batch.slot_cap, scheduler.batch.slot_cap,
        )  # fmt: skip
        self._ran_out_with = 0

    def _release_memory(self) -> None:
        release = getattr(self.model, "release_memory", None)
        if release is not None:
            try:
                release()
            except Exception:
                log.exception("cannot release memory")


def _request_error(error: Exception) -> Exception:
    """Return the error for the one request that made a step fail."""
    if isinstance(error, NoHeadroom):
        return InferenceError("out_of_memory", NO_MEMORY, 1)
    if is_out_of_memory(error):
        return InferenceError(
            "out_of_memory",
            "this request alone needs more memory than there is. Request fewer tokens, send a shorter prompt, or lower "
            "--max-tokens-per-step",
            1,
        )
    return error
