"""Fault injection: `EB_PLUGIN`, which names this module, and behind a space a JSON object.

`{"poison": {"prompt_contains": "X"}, "slow_step": {"ms": 5}}` has the names of faults and their parameters. Faults wrap
the parts that the engine is assembled from, so an engine without them runs none of this code. This module must not know
HTTP or tensors.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TextIO, get_args

from pydantic import BaseModel, ConfigDict, Field

from launch import plugin
from scheduling.iteration import Plan
from scheduling.scheduler import Output
from scheduling.sequence import Sequence
from serving.inference import Inference, InferenceError
from serving.recovery import Model

VARIABLE = plugin.VARIABLE
ENDLESS = 1 << 60
Maker = Callable[..., Inference]


class Parameters(BaseModel):
    """The parameters of a fault."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Step(Parameters):
    """A fault of at most `times` steps, after the first `after`, and only of steps with a prompt that contains the text."""

    prompt_contains: str = ""
    after: int = Field(0, ge=0)
    times: int = Field(ENDLESS, ge=1)
    message: ClassVar[str] = "an armed fault fails this step"
    lasts: ClassVar[bool] = False  # whether all later steps fail too

    def act(self) -> None:
        """Fail, delay or end a step before it is computed."""
        raise RuntimeError(self.message)

    def is_due(self, step: int, plan: Plan) -> bool:
        """Return whether the step has this fault, whatever its prompts are."""
        return step > self.after


class Always(Step):
    lasts = True


class Once(Step):
    times: int = Field(1, ge=1)


class Matching(Step):
    prompt_contains: str = Field(min_length=1)


class OutOfMemoryOnce(Once):
    message = "CUDA out of memory. An armed fault"


class OutOfMemoryFor(Matching):
    message = OutOfMemoryOnce.message


class OutOfMemoryAbove(Step):
    batch: int = Field(ge=0)
    message = OutOfMemoryOnce.message

    def is_due(self, step: int, plan: Plan) -> bool:
        return super().is_due(step, plan) and len(plan.sequences) > self.batch


class Sticky(Step):
    message = "CUDA error: device-side assert triggered. An armed fault"
    lasts = True


class BadKernels(Sticky):
    message = "CUDA error: an illegal memory access was encountered. An armed fault"
    at_start: bool = False  # the model cannot even be loaded

    def is_due(self, step: int, plan: Plan) -> bool:
        return super().is_due(step, plan) and os.environ.get("EB_KERNELS") != "off"


class Slow(Step):
    ms: float = Field(ge=0)

    def act(self) -> None:
        time.sleep(self.ms / 1e3)


class RaiseInLoop(Step):
    error: Literal["SystemExit", "BaseException"] = "SystemExit"

    def act(self) -> None:
        kind = SystemExit if self.error == "SystemExit" else BaseException
        raise kind("an armed fault ends the loop")


class Hang(Step):
    after_steps: int = Field(0, ge=0)

    def act(self) -> None:
        threading.Event().wait()

    def is_due(self, step: int, plan: Plan) -> bool:
        return super().is_due(step, plan) and step > self.after_steps


class HoldGil(Once):
    seconds: float = Field(ge=0)

    def act(self) -> None:
        # A PyDLL calls functions without releasing the GIL.
        ctypes.PyDLL(None).poll(None, 0, int(self.seconds * 1e3))


class PromptFault(Parameters):
    """A fault of each request whose prompt contains a text."""

    prompt_contains: str = Field(min_length=1)


class Loading(Parameters):
    seconds: float = Field(ge=0)


class Sink(Parameters):
    does: Literal["raise", "block"] = "raise"


MAIN_PARAMETER: dict[type[Parameters], str] = {  # the one that a bare value sets
    Matching: "prompt_contains", OutOfMemoryFor: "prompt_contains", PromptFault: "prompt_contains",
    OutOfMemoryAbove: "batch", Slow: "ms", RaiseInLoop: "error", Hang: "after_steps",
    HoldGil: "seconds", Loading: "seconds", Sink: "does",
}  # fmt: skip


class Faults(BaseModel):
    """The armed faults. Without any, each method returns its argument unchanged."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    poison: Matching | None = None  # steps fail
    fail_once: Once | None = None
    fail_always: Always | None = None
    oom_once: OutOfMemoryOnce | None = None
    oom_above: OutOfMemoryAbove | None = None
    oom_for: OutOfMemoryFor | None = None
    sticky: Sticky | None = None  # as a GPU that needs a new process
    bad_kernels: BadKernels | None = None  # like sticky, but EB_KERNELS=off repairs it
    raise_in_loop: RaiseInLoop | None = None  # an exception that `except Exception` does not catch
    hang_loop: Hang | None = None
    hold_gil: HoldGil | None = None
    slow_step: Slow | None = None
    slow_load: Loading | None = None
    nan_row: PromptFault | None = None  # fails only its row
    bad_detokenize: PromptFault | None = None
    lose_event: PromptFault | None = None  # the handler is not notified of the end
    sink: Sink | None = None  # where metrics, logs and the live page go
    stall_seconds: float | None = Field(default=None, gt=0)  # without a step, after which the loop counts as hung

    @property
    def armed(self) -> list[str]:
        """The names of the armed faults."""
        return sorted(self.model_fields_set)

    def load(self) -> None:
        """Delay loading, or fail it."""
        if self.slow_load is not None:
            time.sleep(self.slow_load.seconds)
        if self.bad_kernels is not None and self.bad_kernels.at_start and os.environ.get("EB_KERNELS") != "off":
            raise RuntimeError(self.bad_kernels.message)

    def model(self, model: Any, decode: Callable[[list[int]], str]) -> Any:
        """Return the model with the faults of steps; `decode` returns the text of a prompt."""
        armed = (getattr(self, name) for name in Faults.model_fields)
        steps = [fault for fault in armed if isinstance(fault, Step)]
        if not steps and self.nan_row is None:
            return model
        return FaultyModel(model, steps, self.nan_row, decode)

    def maker(self, make: Maker) -> Maker:
        """Return a factory of inferences that have the faults of single requests."""
        if self.bad_detokenize is None and self.lose_event is None:
            return make

        def make_faulty(prompt: str, *args: Any, **options: Any) -> Inference:
            inference = make(prompt, *args, **options)
            if self.bad_detokenize is not None and self.bad_detokenize.prompt_contains in prompt:
                inference.text = broken = BrokenText(inference.text)
                if inference.sequence.stop is not None:
                    inference.sequence.stop = broken.feed
            if self.lose_event is not None and self.lose_event.prompt_contains in prompt:
                lose_event(inference)
            return inference

        return make_faulty

    def observers(self) -> list[Callable[..., None]]:
        """Return the loop's observers that raise; `block` concerns streams only."""
        return [raise_in_sink] if self.sink is not None and self.sink.does == "raise" else []

    def stream(self, stream: TextIO) -> Any:
        """Return the stream that a log writes to."""
        return stream if self.sink is None else FaultyStream(self.sink.does == "block")


def arming(armed: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of a server with these faults."""
    return {VARIABLE: f"{__name__} {json.dumps(armed)}"}


def read(text: str) -> Faults:
    """Return the faults in JSON; ValueError for an unknown fault or parameter."""
    return Faults.model_validate({name: _parameters(name, value) for name, value in json.loads(text).items()})


def _parameters(name: str, value: Any) -> Any:
    """Return a fault's parameters as an object: `true` means the defaults, and a bare value is the main parameter."""
    if name == "stall_seconds" or isinstance(value, dict):
        return value
    if value is True or value is None:
        return {}
    form = get_args(Faults.model_fields[name].annotation)[0] if name in Faults.model_fields else None
    return {MAIN_PARAMETER[form]: value} if form in MAIN_PARAMETER else value


class FaultyModel:
    """A model whose steps have faults; all other attributes are those of the model."""

    def __init__(
        self, model: Model, faults: list[Step], nan_row: PromptFault | None, decode: Callable[[list[int]], str]
    ) -> None:
        self._model = model
        self._left = {fault: fault.times for fault in faults}
        self._nan_row = nan_row
        self._decode = decode
        self._steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, plan: Plan) -> list[Output]:
        self._steps += 1
        for fault, left in self._left.items():
            lasts = fault.lasts and left < fault.times
            if left and (lasts or self._is_due(fault, plan)):
                self._left[fault] = left - 1
                fault.act()
        outputs = self._model.forward(plan)
        if self._nan_row is None:
            return outputs
        text = self._nan_row.prompt_contains
        return [
            ValueError("the model's output is not finite") if self._has(seq, text) else output
            for seq, output in zip(plan.sequences, outputs)
        ]

    def _is_due(self, fault: Step, plan: Plan) -> bool:
        text = fault.prompt_contains
        return fault.is_due(self._steps, plan) and (not text or any(self._has(seq, text) for seq in plan.sequences))

    def _has(self, seq: Sequence, text: str) -> bool:
        return text in self._decode(seq.prompt_ids)


class BrokenText:
    """The text of an answer, which fails when it is decoded."""

    stop_reason: str | int | None = None

    def __init__(self, text: Any) -> None:
        self.watches = bool(text is not None and text.watches)

    def feed(self, token: Any) -> Any:
        raise ValueError("an armed fault: bad_detokenize")

    def text(self, output_ids: list[int]) -> str:
        raise ValueError("an armed fault: bad_detokenize")

    def growing(self, follows_tokens: bool = False) -> BrokenText:
        return self

    def rest(self, whole: str) -> str:
        raise ValueError("an armed fault: bad_detokenize")

    @property
    def shown_tokens(self) -> int:
        return 0


def lose_event(inference: Inference) -> None:
    """Lose the first notification that the inference has ended."""

    def lost(error: InferenceError | None = None) -> bool:
        del inference.finished
        return False

    inference.finished = lost  # type: ignore[method-assign]


def raise_in_sink(iteration: Any, left: list[Inference]) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FaultyStream:
    """A stream to a full disk, or to a reader that never reads."""

    def __init__(self, blocks: bool) -> None:
        self._blocks = blocks

    def write(self, text: str) -> int:
        if self._blocks:
            threading.Event().wait()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        """Do nothing: all output is lost."""
