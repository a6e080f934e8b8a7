"""Fault injection: `EB_PLUGIN` names this module, and behind a space a JSON object of faults with their parameters.

`{"poison": {"prompt_contains": "X"}, "slow_step": {"ms": 5}}` makes some steps fail and all of them slow. A fault of steps
may be limited by `prompt_contains`, to those `after` a number of steps, and to so many `times`.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from launch.plugin import VARIABLE


def fails(words: str) -> Callable[..., None]:
    def fail(**fault: Any) -> None:
        raise RuntimeError(words)

    return fail


def end_loop(**fault: Any) -> None:
    raise SystemExit("an armed fault ends the loop")  # which `except Exception` does not catch


def hang(**fault: Any) -> None:
    threading.Event().wait()


def hold_gil(seconds: float, **fault: Any) -> None:
    ctypes.PyDLL(None).poll(None, 0, int(seconds * 1e3))  # a PyDLL calls functions without releasing the GIL


OWN, NO_MEMORY = fails("an armed fault fails this step"), fails("CUDA out of memory. An armed fault")
STEPS: dict[str, Callable[..., None]] = {  # what happens instead of a step, or before it
    "poison": OWN, "fail_once": OWN, "fail_always": OWN,
    "oom_once": NO_MEMORY, "oom_above": NO_MEMORY, "oom_for": NO_MEMORY,  # above: of more rows than `batch`
    "sticky": fails("CUDA error: device-side assert triggered. An armed fault"),  # as a GPU that needs a new process
    "bad_kernels": fails("CUDA error: an illegal memory access was encountered. An armed fault"),
    "raise_in_loop": end_loop, "hang_loop": hang, "hold_gil": hold_gil,
    "slow_step": lambda ms, **fault: time.sleep(ms / 1e3),
}  # fmt: skip
ONCE, LASTING = ("fail_once", "oom_once", "hold_gil"), ("fail_always", "sticky", "bad_kernels")
OTHERS = {"slow_load", "nan_row", "bad_detokenize", "sink", "stall_seconds"}


def has_fast_kernels() -> bool:
    return os.environ.get("EB_KERNELS") != "off"


class Faults:
    """The armed faults, with the attributes of a `launch.plugin.Plugin`."""

    def __init__(self, **armed: Any) -> None:
        if unknown := armed.keys() - STEPS.keys() - OTHERS:
            raise ValueError(f"{VARIABLE} arms {', '.join(sorted(unknown))}. Use faults of {__name__}")
        self.faults = armed
        self.armed = sorted(armed)
        self.stall_seconds = armed.get("stall_seconds")
        self.sink = armed.get("sink", {}).get("does")  # "raise" or "block"

    def load(self) -> None:
        time.sleep(self.faults.get("slow_load", {}).get("seconds", 0))
        if self.faults.get("bad_kernels", {}).get("at_start") and has_fast_kernels():
            STEPS["bad_kernels"]()

    def model(self, model: Any, decode: Callable[[list[int]], str]) -> Any:
        return FaultyModel(model, self.faults, decode)

    def maker(self, make: Callable[..., Any]) -> Callable[..., Any]:
        garbled = self.faults.get("bad_detokenize")

        def make_faulty(prompt: str, *args: Any, **options: Any) -> Any:
            inference = make(prompt, *args, **options)
            if garbled and garbled["prompt_contains"] in prompt:
                inference.text = BrokenText(inference.text)
                if inference.sequence.stop is not None:
                    inference.sequence.stop = inference.text.feed
            return inference

        return make_faulty

    def observers(self) -> list[Callable[..., None]]:
        return [refuse] if self.sink == "raise" else []

    def stream(self, stream: Any) -> Any:
        return FaultyStream(self.sink) if self.sink else stream


def arming(armed: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of a server with these faults."""
    return {VARIABLE: f"{__name__} {json.dumps(armed)}"}


def read(text: str) -> Faults:
    return Faults(**json.loads(text))


class FaultyModel:
    """A model whose steps have faults; all other attributes are those of the model."""

    def __init__(self, model: Any, faults: Mapping[str, Any], decode: Callable[[list[int]], str]) -> None:
        self._model, self._decode, self._steps = model, decode, 0
        self._faults = {name: faults[name] for name in STEPS if name in faults}
        self._nan_row = faults.get("nan_row")
        self._acted = dict.fromkeys(self._faults, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, plan: Any) -> list[Any]:
        self._steps += 1
        for name, fault in self._faults.items():
            if (name in LASTING and self._acted[name]) or self._is_due(name, fault, plan):
                self._acted[name] += 1
                STEPS[name](**fault)
        outputs = self._model.forward(plan)
        if self._nan_row is not None:
            for i, seq in enumerate(plan.sequences):
                if self._nan_row["prompt_contains"] in self._decode(seq.prompt_ids):
                    outputs[i] = ValueError("the model's output is not finite")
        return outputs

    def _is_due(self, name: str, fault: Mapping[str, Any], plan: Any) -> bool:
        times, text = fault.get("times", 1 if name in ONCE else 1 << 60), fault.get("prompt_contains", "")
        return (
            self._acted[name] < times
            and self._steps > fault.get("after", 0)
            and len(plan.sequences) > fault.get("batch", -1)
            and (name != "bad_kernels" or has_fast_kernels())
            and (not text or any(text in self._decode(seq.prompt_ids) for seq in plan.sequences))
        )


class BrokenText:
    """The text of an answer, which fails when it is decoded."""

    stop_reason, shown_tokens = None, 0

    def __init__(self, text: Any) -> None:
        self.watches = bool(text is not None and text.watches)

    def growing(self, follows_tokens: bool = False) -> BrokenText:
        return self

    def fail(self, *given: Any) -> Any:
        raise ValueError("an armed fault: bad_detokenize")

    feed = text = rest = fail


def lose_event(inference: Any) -> None:
    """Lose the first notification that the inference has ended."""

    def lost(error: Any = None) -> bool:
        del inference.finished
        return False

    inference.finished = lost


def refuse(*given: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FaultyStream:
    """A stream to a full disk, or to a reader that never reads."""

    def __init__(self, does: str) -> None:
        self.write = refuse if does == "raise" else lambda text: threading.Event().wait()

    def flush(self) -> None:
        """Do nothing: all output is lost."""
