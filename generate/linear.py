"""Linear layers at the speed of the machine: oneDNN's prepacked kernels on a CPU, cuBLAS on a GPU.

PyTorch's plain `F.linear` in float32 calls MKL, which on some processors runs at a third of the speed of oneDNN
(and differs in its last bits with the number of rows); so the two are timed once for each format, and the faster
serves. The results of oneDNN's bfloat16 kernels do not depend on the number of rows; its float32 kernels differ
for a single row alone, so a single row is computed as two.

It must not know layers, pages or requests.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from model import ACTIVATIONS

log = logging.getLogger(__name__)


class Linear:
    """y = activation(x W + b), or `add`: y = x W + b + residual. Weight (out, in), x (rows, in)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.activate = ACTIVATIONS[activation] if activation else None

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return self.activate(y) if self.activate else y

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias).add_(residual)


class PackedLinear:
    """The same through oneDNN, the weight packed once, activation and residual fused."""

    FUSED = {"gelu_new": ("gelu", "tanh"), "gelu_pytorch_tanh": ("gelu", "tanh"), "gelu": ("gelu", "none"),
             "relu": ("relu", "")}  # fmt: skip

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)
        self.bias = bias
        self.fused = self.FUSED.get(activation or "", ("none", ""))
        self.activate = ACTIVATIONS[activation] if activation and self.fused[0] == "none" else None

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) == 1 and x.dtype == torch.float32:
            return self(torch.cat((x, x)))[:1]
        name, form = self.fused
        y = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, name, [], form)
        return self.activate(y) if self.activate else y

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        if len(x) == 1 and x.dtype == torch.float32:
            return self.add(torch.cat((x, x)), torch.cat((residual, residual)))[:1]
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.packed, self.bias, "add")


def make_linear(
    weight: Tensor, bias: Tensor | None, activation: str | None = None
) -> Linear | PackedLinear:
    """Return the faster linear layer for this weight's device and dtype."""
    if weight.device.type == "cpu" and packed_is_faster(weight.dtype):
        return PackedLinear(weight, bias, activation)
    return Linear(weight, bias, activation)


@functools.cache
def packed_is_faster(dtype: torch.dtype) -> bool:
    """Time oneDNN's packed linear against PyTorch's plain one on this machine, at 1 and 16 rows."""
    try:
        weight = torch.randn(2048, 1024).to(dtype)
        layers = PackedLinear(weight, None), Linear(weight, None)
        seconds = [0.0, 0.0]
        for rows in (1, 16):
            x = torch.randn(rows, 1024).to(dtype)
            for i, layer in enumerate(layers):
                seconds[i] += _best_time(functools.partial(layer, x))
    except (RuntimeError, AttributeError) as error:
        log.warning(
            "oneDNN's packed linear layers do not run here (%s), PyTorch's plain ones do", error
        )
        return False
    return seconds[0] <= seconds[1]


def _best_time(call: Callable[[], Tensor], repeats: int = 7) -> float:
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best
