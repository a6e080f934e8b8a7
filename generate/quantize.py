"""What the weights of linear layers are rounded to with --quantize: where that runs, and which weights cannot be rounded.

It must not know how a kernel computes, nor the layers of an architecture.
"""

from __future__ import annotations

import torch
from torch import Tensor

from generate.cpu.linear import FORMATS, kernel_runs
from generate.machine import MachineError

NONE = "none"


class QuantizeError(ValueError):
    """A weight that cannot be rounded."""


def check(quantize: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise MachineError where linear layers cannot have weights in this format; the message names those that run."""
    if quantize == NONE:
        return
    if device.type != "cpu":
        raise MachineError(f"--quantize {quantize} is for CPUs. Use {NONE} on the {device.type}, or --device cpu")
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise MachineError(f"--quantize {quantize} computes in bfloat16, not in {name}. Use --dtype bfloat16 or auto")
    if not kernel_runs(quantize):
        runnable = ", ".join([NONE, *(name for name in FORMATS if name != NONE and kernel_runs(name))])
        raise MachineError(
            f"--quantize {quantize} needs the C kernels, which do not run here (see ./server.sh doctor). Use {runnable}"
        )


def check_finite(quantize: str, name: str, weight: Tensor) -> None:
    """Raise QuantizeError for a weight that is to be rounded and holds NaN or infinity."""
    if quantize != NONE and not torch.isfinite(weight).all():
        raise QuantizeError(
            f"{name} holds NaN or infinity, so it cannot be rounded to {quantize}. Use --quantize {NONE}"
        )
