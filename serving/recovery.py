"""What becomes of a step that fails: whose fault it is is found, the others go on; or the engine is given up.

A step moves nothing until it is committed, so it can be tried again, in whole, by halves, or with fewer members. Only
the loop's thread calls this. It must not know HTTP, tensors, or how an inference is told of its end.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from scheduling.iteration import Plan
from scheduling.scheduler import ENDLESS, Output, Scheduler, Token
from scheduling.sequence import Sequence
from serving.inference import InferenceError

log = logging.getLogger(__name__)

TROUBLES = 3  # so many steps of which nothing could be computed, within
TROUBLE_SECONDS = 60.0  # are the engine's fault
PAUSE_SECONDS = 0.1  # before such a step is tried again
# The last two are oneDNN's, of which every shape was computed before: only memory can be what it misses.
NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory",
             "alloc_failed", "could not create a primitive", "could not create a memory")  # fmt: skip
BEYOND_REPAIR = ("device-side assert", "illegal memory access", "illegal instruction", "misaligned address",
                 "unspecified launch failure", "uncorrectable ecc", "cuda error: unknown error", "launch timed out",
                 "hardware stack error", "invalid program counter", "nvlink")  # fmt: skip


class Model(Protocol):
    """What computes a step: `generate.runner.ModelRunner`, or a mock that only takes its time.

    One that has `release_memory()` is asked to, when memory has run out.
    """

    def forward(self, plan: Plan) -> list[Output]: ...


class EngineBroken(Exception):
    """Nothing can be computed any more in this process; the words are for everybody to read."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, whatever the library that says so; none of them need be imported for it."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in NO_MEMORY)


def is_beyond_repair(error: BaseException) -> bool:
    """Whether no step can succeed after this one but in a new process, as after a CUDA assertion."""
    if isinstance(error, SystemError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in BEYOND_REPAIR)


class Recovery:
    """Computes plans, whatever breaks; `make_probe` gives a sequence that asks for one token, of nobody's request.

    `is_in_doubt` from the first failure until that token has been computed.
    """

    def __init__(
        self,
        model: Model,
        make_probe: Callable[[], Sequence],
        clock: Callable[[], float],
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.model = model
        self.is_in_doubt = False
        self.steps_failed = 0
        self.steps_retried = 0
        self.out_of_memory = 0
        self._make_probe = make_probe
        self._clock = clock
        self._pause = pause
        self._troubles: deque[float] = deque()

    def compute(self, scheduler: Scheduler, plan: Plan) -> tuple[Plan, list[Output]]:
        """Return the outputs of a step, of one that raises each request's own or the error that is its alone.

        The plan comes back with them, without those whom memory could not hold: they wait again. EngineBroken when
        nothing can be computed.
        """
        while True:
            try:
                return plan, self._forward(plan)
            except Exception as error:
                log.exception(
                    "step %d failed with %d requests in it", plan.number, len(plan.sequences)
                )
                self._note(error)
                no_memory = is_out_of_memory(error)
            self.is_in_doubt = True
            self.steps_failed += 1
            self.out_of_memory += no_memory
            if no_memory:
                plan, outputs = self._shed(scheduler, plan)
            else:
                outputs = self._bisect(plan, failed_alone=True)
            if not all(isinstance(output, BaseException) for output in outputs) or self.prove():
                return plan, outputs
            self._pause(PAUSE_SECONDS)

    def prove(self) -> bool:
        """Compute one token of nobody's; whether it came. EngineBroken when it has not come too often."""
        try:
            probe = self._make_probe()
            probe.pages = [0]  # the page of padding
            token = self._forward(Plan(0, self._clock(), [probe], [probe.pending]))[0]
            if isinstance(token, BaseException):
                raise token
            if not isinstance(token, int | Token):
                raise RuntimeError("the model returned no token where one was expected")
            self.is_in_doubt = False
        except Exception as error:
            log.exception("the probe step failed as well")
            self._note(error)
            self.is_in_doubt = True
            self._count_trouble(error)
        return not self.is_in_doubt

    def _note(self, error: BaseException) -> None:
        if is_beyond_repair(error):
            raise EngineBroken(
                "the device is in a state that only a new process can recover from"
            ) from error

    def _count_trouble(self, error: BaseException) -> None:
        now = self._clock()
        self._troubles.append(now)
        while now - self._troubles[0] > TROUBLE_SECONDS:
            self._troubles.popleft()
        if "cuda error" in str(error).lower():
            raise EngineBroken("the device no longer computes") from error
        if len(self._troubles) >= TROUBLES:
            raise EngineBroken(
                f"{TROUBLES} steps within {TROUBLE_SECONDS:g} s failed for all requests, the last with "
                f"{type(error).__name__}, and no single request was at fault"
            ) from error

    def _forward(self, plan: Plan) -> list[Output]:
        outputs = self.model.forward(plan)
        if len(outputs) != len(plan.sequences):
            raise RuntimeError(f"{len(outputs)} outputs for {len(plan.sequences)} sequences")
        return outputs

    def _try(self, plan: Plan) -> list[Output] | Exception:
        """Return the outputs, or the error without what its traceback keeps alive."""
        self.steps_retried += 1
        try:
            return self._forward(plan)
        except Exception as error:
            self._note(error)
            error.__context__ = error.__cause__ = None
            return error.with_traceback(None)

    def _bisect(self, plan: Plan, failed_alone: bool = False) -> list[Output]:
        """Try again, as it is first, since the fault may have passed, then by halves until the culprits are alone.

        About 2 log2 n steps find one of n. Who is alone has to fail twice, since a fault that passes may come then too.
        """
        n = len(plan.sequences)
        tried = self._try(plan)
        if isinstance(tried, Exception) and n == 1 and not failed_alone:
            tried = self._try(plan)
        if not isinstance(tried, Exception):
            return tried
        if n < 2:
            return [_own(tried)] * n
        halves = (slice(0, n // 2), slice(n // 2, n))
        parts = [replace(plan, sequences=plan.sequences[half], counts=plan.counts[half], held=[])
                 for half in halves]  # fmt: skip
        return [output for part in parts for output in self._bisect(part)]

    def _shed(self, scheduler: Scheduler, plan: Plan) -> tuple[Plan, list[Output]]:
        """Compute what fits into memory, and say how many may run from now on if not all did."""
        ran = len(scheduler.running)
        plan, outputs = self._shrink(scheduler, plan)
        if len(scheduler.running) < ran and scheduler.slot_cap < ENDLESS:
            log.warning(
                "memory ran out with %d running requests; the limit is now %d. "
                "Start with --max-batch-size %d", ran, scheduler.slot_cap, scheduler.slot_cap,
            )  # fmt: skip
        return plan, outputs

    def _shrink(self, scheduler: Scheduler, plan: Plan) -> tuple[Plan, list[Output]]:
        """Release memory and try again, with ever fewer: the newest half waits again."""
        failed_alone = len(plan.sequences) < 2
        while True:
            self._release_memory()
            tried = self._try(plan)
            if not isinstance(tried, Exception):
                return plan, tried
            if not is_out_of_memory(tried):
                return plan, self._bisect(plan)
            self.out_of_memory += 1
            n = len(plan.sequences)
            if n < 2 and failed_alone:  # it is the request that is too large, not the batch
                scheduler.slot_cap = ENDLESS
                return plan, [_own(tried)] * n
            if n < 2:
                failed_alone = True
                continue
            plan = scheduler.put_back(plan, plan.sequences[math.ceil(n / 2) :], self._clock())
            scheduler.slot_cap = len(scheduler.running)

    def _release_memory(self) -> None:
        release = getattr(self.model, "release_memory", None)
        if release is not None:
            try:
                release()
            except Exception:
                log.exception("cannot release memory")


def _own(error: Exception) -> Exception:
    """Return what the one request is told that a step failed with."""
    if is_out_of_memory(error):
        return InferenceError(
            "out_of_memory",
            "this request alone needs more memory than there is. Request fewer tokens, send a shorter prompt, or lower "
            "--max-tokens-per-step",
            1,
        )
    return error
