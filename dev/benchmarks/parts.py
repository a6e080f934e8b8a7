"""Where the time of a step goes: linear layers, attention, the rest of the layers, the head, sampling, the host.

The parts of the layers are timed in C (parts.c), between the call for all of them and its kernels.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from generate.cpu.blocks import CBlocks
from generate.cpu.kernels import load_library
from generate.runner import ModelRunner
from scheduling.iteration import Plan

NAMES = ("linear", "attention", "layers", "head", "sampling", "host")
DRAWS = 5  # times that the tokens of a step are sampled again, to time that alone


class Parts:
    """The seconds of each part of the steps of a runner whose layers run in C, from `timed` on."""

    def __init__(self, runner: ModelRunner) -> None:
        assert isinstance(runner.blocks, CBlocks)
        self._runner, self._model, self._library = (
            runner,
            runner.blocks.model,
            load_library(Path(__file__).with_name("parts.c")),
        )
        self._library.parts_of(ctypes.c_void_p(self._model.linear), ctypes.c_void_p(self._model.attention))
        self._spent = {"layers": 0.0, "head": 0.0}
        self._logits: Tensor

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time the parts of all steps meanwhile."""
        runner, model = self._runner, self._model
        before = runner.blocks, runner.head, model.linear, model.attention
        blocks, head = before[:2]

        def timed(name: str, run: Any) -> Any:
            def call(*args: Any) -> Tensor:
                began = time.perf_counter()
                result: Tensor = run(*args)
                self._spent[name] += time.perf_counter() - began
                self._logits = result
                return result

            return call

        for name in ("linear", "attention"):
            setattr(model, name, ctypes.cast(getattr(self._library, f"timed_{name}"), ctypes.c_void_p).value)
        runner.blocks, runner.head = timed("layers", blocks), timed("head", head)
        try:
            yield
        finally:
            runner.blocks, runner.head, model.linear, model.attention = before

    def take(self, total: float) -> dict[str, float]:
        """Return the seconds of each part of the step that took `total`, in the order of NAMES, and forget them."""
        inside = (ctypes.c_double * 2)()
        self._library.parts_take(inside)
        layers, head = self._spent["layers"], self._spent["head"]
        self._spent = {"layers": 0.0, "head": 0.0}
        sampling = self._sampling()
        rest = total - layers - head - sampling
        return dict(zip(NAMES, (*inside, layers - sum(inside), head, sampling, rest)))

    def _sampling(self) -> float:
        """Return the seconds of sampling a token for each row of the last step again, 0 if it was a prompt."""
        last, times = self._runner._last, []
        for _ in range(DRAWS if last is not None else 0):
            began = time.perf_counter()
            last.draws.draw(self._logits, last.rows.context_lens.long(), lambda i: None)  # type: ignore[union-attr, arg-type, return-value]
            times.append(time.perf_counter() - began)
        return median(times) if times else 0.0


def of_steps(runner: ModelRunner, plans: Iterable[Plan], most: int | None = None) -> list[dict[str, float]]:
    """Return the seconds of each part of these steps; with `most`, of so many after two that warm up."""
    parts, found = Parts(runner), list[dict[str, float]]()
    with parts.timed():
        for plan in islice(plans, most and most + 2):
            began = time.perf_counter()
            runner.forward(plan)
            found.append(parts.take(time.perf_counter() - began))
    return found[2:] if most else found


def total(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the sums of the parts of several steps."""
    return {name: sum(step[name] for step in steps) for name in NAMES}
