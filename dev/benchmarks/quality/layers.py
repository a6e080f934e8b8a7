"""The error of each linear layer in a format, on the inputs that it gets in float32.

The engine's own layers are called, on a CPU. It must not know formats, nor what a text is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dev.benchmarks import offline
from dev.benchmarks.quality.figures import SCORED
from generate.runner import ModelRunner
from scheduling.sequence import Sequence as Request

PARTS = ("qkv", "attn_proj", "fc", "mlp_proj")
MIXTURE = ("qkv", "attn_proj", "experts")  # which are judged together, with the rows that they choose
HEAD = "head"


class Exact(NamedTuple):
    """What a layer got and gave in float32: x (rows, in), y (rows, out)."""

    x: Tensor
    y: Tensor


class Worst(NamedTuple):
    """The layer with the largest relative error; `error` is the norm of the difference over the norm of the output."""

    name: str
    error: float


class Recorder:
    """Takes the place of a layer, and keeps what passed through it."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.seen: list[Exact] = []

    def __call__(self, x: Tensor, extra: None = None) -> Tensor:
        y: Tensor = self.layer(x)
        self.seen.append(Exact(x.clone(), y.clone()))
        return y

    def add(self, x: Tensor, residual: Tensor, extra: None = None) -> Tensor:
        return self(x) + residual


def record(runner: ModelRunner, ids: Sequence[int]) -> dict[str, Exact]:
    """Return the inputs and outputs of every layer of a float32 `runner` for one prompt. The runner is spoiled."""
    recorders: dict[str, Recorder] = {}
    for name, owner, attribute in places(runner):
        recorders[name] = Recorder(getattr(owner, attribute))
        setattr(owner, attribute, recorders[name])
    # Scoring the prompt takes the head's outputs for all of its tokens, not only for the last.
    offline.serve(runner, [Request(list(ids), 1, sampling=SCORED)], "dynamic", 1, len(ids))
    return {name: recorder.seen[-1] for name, recorder in recorders.items()}


def places(runner: ModelRunner) -> Iterator[tuple[str, object, str]]:
    """Yield name, owner and attribute of every linear layer, and of every mixture of experts."""
    for number, block in enumerate(runner.blocks.blocks):
        for part in MIXTURE if block.experts else PARTS:
            yield f"{number} {part}", block, part
    yield HEAD, runner, HEAD


@torch.inference_mode()
def worst(runner: ModelRunner, exact: dict[str, Exact]) -> Worst:
    """Return the layer of `runner` whose outputs differ most from the exact ones."""
    result = Worst("", -1.0)
    for name, owner, attribute in places(runner):
        layer: Callable[[Tensor], Tensor] = getattr(owner, attribute)
        x, y = exact[name]
        difference = layer(x.to(runner.dtype)).float() - y
        error = float(difference.norm() / y.norm().clamp_min(1e-30))
        if not error <= result.error:  # a NaN is the worst of all
            result = Worst(name, error)
    return result
