"""What --quantize makes of the weights of linear layers: where that runs, and which models and weights cannot have it.

It must not know how a kernel computes, nor the layers of an architecture.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from generate.cpu.linear import FORMATS, kernel_runs
from generate.machine import MachineError
from models import weights
from models.gguf.block_matrix import KINDS, BlockMatrix, Weight
from models.network import Network
from models.sources.resolved import ResolvedModel

NONE, AS_STORED = "none", "as-stored"
FOUR_BITS = tuple(kind for kind in KINDS if kind.startswith("Q4"))


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
    if not kernel_runs("int4" if quantize == AS_STORED else quantize):
        raise MachineError(
            f"--quantize {quantize} needs the C kernels, which do not run here (see ./server.sh doctor). Use {_rounded()}"
        )


def _rounded() -> str:
    """Return the values that run here with any model."""
    return ", ".join([NONE, *(name for name in FORMATS if name != NONE and kernel_runs(name))])


def kept_kinds(quantize: str, resolved: ResolvedModel) -> tuple[str, ...]:
    """Return the kinds of blocks that linear layers use as the model's file has them.

    Rounding to 4 bits keeps what has 4 bits already. Raises MachineError where "as-stored" finds no blocks to keep; the
    message names the values that this model can have.
    """
    if quantize == "int4":
        return FOUR_BITS
    if quantize != AS_STORED:
        return ()
    if not weights.stored_kinds(resolved, KINDS):
        raise MachineError(
            f"--quantize {quantize} needs a GGUF file whose linear layers are in {' or '.join(KINDS)}, and {resolved.name} "
            f"has none of these. Use {_rounded()}"
        )
    return KINDS


def kinds_of(model: Network) -> list[str]:
    """Return the kinds of a model's matrices that are in blocks, the one with most numbers first."""
    counts: Counter[str] = Counter()
    for matrix in {id(matrix): matrix for matrix in (*model.tensors(), model.head)}.values():
        if isinstance(matrix, BlockMatrix):
            counts[matrix.kind] += matrix.numel()
    return [kind for kind, _ in counts.most_common()]


def check_finite(quantize: str, name: str, weight: Weight) -> None:
    """Raise QuantizeError for a weight that is to be rounded and holds NaN or infinity. Blocks are checked when read."""
    if quantize != NONE and isinstance(weight, Tensor) and not torch.isfinite(weight).all():
        raise QuantizeError(
            f"{name} holds NaN or infinity, so it cannot be rounded to {quantize}. Use --quantize {NONE}"
        )
