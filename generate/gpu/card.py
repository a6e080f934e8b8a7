"""The card: whether it works, what its owner should know about it, and whether an error leaves it usable.

A poisoned CUDA context cannot be repaired: each later call raises the same error until the process ends. This module
must not know models or requests.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

DRIVER = Path("/proc/driver/nvidia/version")
TRITON = (7, 0)  # the minimum compute capability; below it, Triton's compiler may kill the process
GIB = 1 << 30


def is_plain() -> bool:
    """Return whether all parts are plain PyTorch: with `EB_KERNELS=off`, or on a card that is too old for Triton."""
    is_old = torch.cuda.is_available() and torch.cuda.get_device_capability() < TRITON
    return os.environ.get("EB_KERNELS") == "off" or is_old


def problem() -> str:
    """Return why PyTorch cannot compute on a GPU, as the rest of a sentence; empty if it can."""
    torch_here = f"torch {torch.__version__}"
    if not torch.cuda.is_available() and not DRIVER.exists():
        return f"{torch_here} sees no GPU"
    if not torch.cuda.is_available() and torch.version.cuda is None:
        return f"{torch_here} is a build for CPUs. Delete .venv: the next start installs the build with CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # raises what is_available() hides, such as an old driver
        float(torch.ones(2, device="cuda").sum())  # a torch without code for this card, a card in exclusive use
    except Exception as error:
        return f"{torch_here} cannot compute on the GPU: {first_line(error)}"
    return ""


def has_bfloat16() -> bool:
    """Return whether the GPU multiplies bfloat16 numbers in hardware."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def raise_if_lost(failure: Exception) -> None:
    """Raise where plain PyTorch cannot take over: memory ran out, or a kernel has poisoned the CUDA context."""
    if isinstance(failure, torch.OutOfMemoryError):
        raise failure
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def remarks(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return a sentence for each property of the card that costs speed or memory, before the model is loaded."""
    (free, total), (major, minor) = torch.cuda.mem_get_info(device), torch.cuda.get_device_capability(device)
    name, count, used = torch.cuda.get_device_name(device), torch.cuda.device_count(), f"{(total - free) / GIB:.1f}"
    found = (
        (count > 1, f"there are {count} cards, and this server uses only {name}. CUDA_VISIBLE_DEVICES selects another"),
        # The CUDA context itself takes about half of that.
        (total - free > GIB, f"other programs use {used} of the {total / GIB:.1f} GiB of {name}. nvidia-smi lists them"),
        ((major, minor) < TRITON, f"{name} has compute capability {major}.{minor}, but Triton needs 7.0: plain PyTorch serves, slowly"),
        (dtype == torch.bfloat16 and not has_bfloat16(), f"{name} has no bfloat16 in hardware. Use --dtype float16"),
    )  # fmt: skip
    return [text for is_so, text in found if is_so]


def first_line(error: BaseException) -> str:
    """Return the first line of an error; in CUDA's, advice for developers follows it."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
