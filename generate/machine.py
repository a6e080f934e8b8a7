"""This machine's device, number format, kernels, threads, and memory for KV pages.

It must not know models beyond their shape.
"""

from __future__ import annotations

import os
import platform
import resource
from concurrent.futures import Future
from ctypes import CDLL
from pathlib import Path

import torch

from generate import cgroups, memory
from generate.cores import cores
from generate.cpu import kernels, linear
from generate.gpu import card
from models.architecture import Architecture

PAGE_SIZE = 64
GPU_PAGE_SIZE = 128  # one program of the decode kernel reads one page
CPU_SHARE, CPU_MOST = 0.3, 2 << 30  # share of the free memory, and the most bytes, without --kv-memory
GPU_SHARE = 0.8


class MachineError(ValueError):
    """This machine does not support a setting; the message names the remedy."""


def choose_device(wanted: str) -> torch.device:
    """Return the device for auto, cpu or cuda; auto is a GPU where one computes."""
    problem = "" if wanted == "cpu" else card.problem()
    if wanted == "cuda" and problem:
        raise MachineError(f"--device is cuda, but {problem}. Correct that, or use --device cpu")
    return torch.device("cpu" if wanted == "cpu" or problem else "cuda")


def choose_dtype(wanted: str, device: torch.device, trained: str | None = None, quantize: str = "none") -> torch.dtype:
    """Return the number format; auto is the fastest one.

    On a GPU that is a 16-bit one that it computes in hardware: bfloat16 for a model that was `trained` in it, because its
    values may be too large for float16, which is more exact for all others. A CPU takes bfloat16 beside weights that are
    rounded to fewer bits.
    """
    if wanted == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if trained == "bfloat16" and card.has_bfloat16() else torch.float16
        return torch.bfloat16 if quantize != "none" or bfloat16_is_faster() else torch.float32
    if wanted == "float16" and device.type == "cpu":
        raise MachineError("--dtype float16 is for GPUs. Use bfloat16 or float32 on a CPU")
    dtype: torch.dtype = getattr(torch, wanted)
    return dtype


def choose_kv_dtype(wanted: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the number format of keys and values; auto is the model's `dtype`."""
    if wanted == "auto":
        return dtype
    if device.type != "cpu":
        raise MachineError(f"--kv-dtype {wanted} is for CPUs. Use auto on the {device.type}, or --device cpu")
    return torch.int8


def bfloat16_is_faster() -> bool:
    """Return whether this CPU computes faster in bfloat16 than in float32.

    It does where the processor multiplies bfloat16. It also does where our C kernels widen it in registers, because
    they read half the bytes from memory.
    """
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:  # not Linux
        words = set()
    if words & {"avx512_bf16", "amx_bf16", "bf16"}:
        return True
    widens = {"avx2", "fma"} <= words or platform.machine().lower() in ("aarch64", "arm64")
    try:
        return widens and os.environ.get("EB_KERNELS") != "off" and bool(kernels.find_compiler())
    except kernels.KernelError:
        return False


def prepare(dtype: torch.dtype, quantize: str) -> list[Future[CDLL]]:
    """Begin to load the C files that a model of `dtype` needs, while its weights are read: compiling takes seconds a file.

    Return those that are compiled. Whoever then loads a file gets its error.
    """
    if os.environ.get("EB_KERNELS") == "off":
        return []
    begun = []
    for source in sorted(Path(linear.__file__).parent.glob("*.c")):
        if source != linear.SOURCE:
            begun.append(kernels.begin(source))
        elif dtype == torch.bfloat16 or quantize != "none":  # else oneDNN or PyTorch serve
            begun.append(kernels.begin(source, linear.UNFUSED))
    return [library for library in begun if library is not None]


def use_threads(count: int) -> int:
    """Let PyTorch compute with `count` threads, 0 for one per core; return the number."""
    count = count or cores()
    torch.set_num_threads(count)
    return count


def free_memory(device: torch.device) -> int:
    """Return the free bytes on `device`, within the limits of this process."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _free_by_sysconf()
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
        if (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:  # ulimit -v
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            free = min(free, max(0, limit - mapped))
    except (OSError, StopIteration, ValueError):
        pass
    return int(min(free, cgroups.free_memory()))


def _free_by_sysconf() -> int:
    try:
        pages = os.sysconf("SC_AVPHYS_PAGES")
    except ValueError:  # macOS knows only how much memory there is, of which other programs use some
        pages = os.sysconf("SC_PHYS_PAGES") // 2
    return pages * os.sysconf("SC_PAGE_SIZE")


def page_size(device: torch.device) -> int:
    """Return how many tokens a KV page holds on `device`."""
    return GPU_PAGE_SIZE if device.type == "cuda" else PAGE_SIZE


def bytes_per_token(shape: Architecture, dtype: torch.dtype) -> int:
    """Return the size of one token's keys and values in all layers, in pools of `dtype`."""
    return 2 * shape.n_layer * shape.n_kv_head * memory.kv_row_size(shape.head_size, dtype) * dtype.itemsize


def kv_pages(shape: Architecture, dtype: torch.dtype, device: torch.device, kv_memory: int, slots: int) -> int:
    """Return the number of pages: as many as `kv_memory` bytes hold, or for 0 a share of the free memory.

    Pages beyond a whole context for each slot serve only the prefix cache. On a CPU it gets as many pages again as the
    slots; a GPU's memory has no other use, so there it gets the rest of the share. There may be too few for one whole
    context, see `longest_context`. Raises MachineError if not even one page fits.
    """
    size = page_size(device)
    page = bytes_per_token(shape, dtype) * size
    context = -(-shape.block_size // size)
    free = free_memory(device)
    if kv_memory:
        pages = kv_memory // page
    elif device.type == "cuda":
        pages = int(free * GPU_SHARE) // page
    else:
        pages = min(int(min(free * CPU_SHARE, CPU_MOST)) // page, 2 * slots * context)
    if kv_memory > free:
        raise MachineError(
            f"--kv-memory is {kv_memory:,} bytes, but only {free:,} are free on the {device.type}. Lower it"
        )
    if pages < 1:
        raise MachineError(
            f"memory for keys and values does not hold one page of {size} tokens, which has {page:,} bytes. "
            f"Set --kv-memory to at least {context * page:,} for a context of {shape.block_size:,} tokens, "
            "or use a smaller model"
        )
    return pages + 1  # page 0 is for padding


def longest_context(shape: Architecture, n_pages: int, device: torch.device) -> int:
    """Return the context of the model, or as much of it as `n_pages` hold for one sequence."""
    return min(shape.block_size, (n_pages - 1) * page_size(device))


def short_context_warning(shape: Architecture, context: int, dtype: torch.dtype) -> str:
    """Return what to report where only `context` tokens of the model's fit."""
    needed = -(-shape.block_size // GPU_PAGE_SIZE) * GPU_PAGE_SIZE * bytes_per_token(shape, dtype)
    return (
        f"memory for keys and values holds {context:,} of the model's {shape.block_size:,} tokens of context, so the "
        f"context is {context:,}. For all of it, set --kv-memory to at least {needed:,} bytes"
    )
