"""The machine's own limits, measured in the run that is compared with them, and its description in a result."""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from generate import memory
from generate.cores import cores
from generate.cpu.kernels import KernelError, load_library
from generate.cpu.linear import KernelLinear, LinearLayer, bfloat16_way, kernel_runs, make_linear
from generate.machine import bytes_per_token
from models.architecture import Architecture
from models.gguf.block_matrix import KINDS, BlockMatrix

log = logging.getLogger(__name__)


def best_seconds(call: Callable[[], object], seconds: float = 0.15, least: int = 3) -> float:
    """Return the shortest of many runs of `call`, after one warm-up run."""
    call()
    best, began, runs = float("inf"), time.perf_counter(), 0
    while runs < least or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        runs += 1
    return best


def bandwidth() -> float:
    """Return the bytes per second that this machine reads from memory, with all compute threads.

    It is the best of some reads of 512 MiB, far more than caches hold, in huge pages like the weights.
    """
    data = _large_block()
    return data.nbytes / best_seconds(data.sum)


@functools.cache
def _large_block() -> Tensor:
    return memory.empty((128 << 20,), torch.float32).fill_(1.0)


def arithmetic_rate(dtype: torch.dtype, quantize: str = "none") -> float:
    """Return the peak operations per second, on all compute threads, of the instruction that multiplies such weights.

    It is measured with products of registers alone (peak.c). Without our kernels, it is the rate of a large product in
    the caches.
    """
    if dtype == torch.float32 or kernel_runs():
        try:
            return _peak(_instruction(dtype, quantize))
        except KernelError as error:
            log.warning("no instruction's peak, so the limit is that of a product in the caches: %s", error)
    rows, inner, outer = 256, 1024, 1024
    layer = _layer(torch.randn(outer, inner).to(dtype), quantize)
    x = torch.randn(rows, inner).to(dtype)
    return 2 * rows * inner * outer / best_seconds(functools.partial(layer, x))


def _instruction(dtype: torch.dtype, quantize: str) -> str:
    """Return the function of peak.c for what a layer of these weights takes for many rows."""
    if dtype == torch.float32:
        return "peak_fma"
    if quantize == "none":
        return f"peak_{bfloat16_way()}"
    if bfloat16_way() == "tiles" and _peaks().peak_byte_tiles(1, 1):
        return "peak_byte_tiles"
    return "peak_small_bytes" if quantize in ("int4", "Q4_0", "Q4_1") else "peak_bytes"


def _peak(name: str) -> float:
    run, threads, rounds, seconds = getattr(_peaks(), name), torch.get_num_threads(), 1 << 14, 0.0
    while seconds < 0.01:
        rounds *= 4
        seconds = best_seconds(functools.partial(run, rounds, threads))
    operations: int = run(rounds, threads)
    return operations / seconds


@functools.cache
def _peaks() -> ctypes.CDLL:
    library = load_library(Path(__file__).with_name("peak.c"))
    for name in ("fma", "dot", "bytes", "small_bytes", "tiles", "byte_tiles"):
        function = getattr(library, f"peak_{name}")
        function.argtypes, function.restype = (ctypes.c_int64, ctypes.c_int), ctypes.c_int64
    return library


def weight_bytes(dtype: torch.dtype, quantize: str = "none") -> float:
    """Return the bytes that one weight of a linear layer takes, its share of scales among them."""
    if quantize == "none":
        return dtype.itemsize
    weight = torch.zeros(1024, 1024, dtype=dtype)
    layer = _layer(weight, quantize)
    assert isinstance(layer, KernelLinear)
    return layer.packed.nbytes / weight.numel()


def _layer(weight: Tensor, quantize: str) -> LinearLayer:
    """Return a layer with weights in a value of `--quantize`, or in a kind of blocks."""
    if quantize in KINDS:
        return KernelLinear(BlockMatrix.of(weight, quantize), None)
    return make_linear(weight, None, quantize=quantize)


def limit_seconds(
    shape: Architecture,
    dtype: torch.dtype,
    batch: int,
    context: int,
    bandwidth: float,
    rate: float,
    kv_dtype: torch.dtype | None = None,
    quantize: str = "none",
) -> float:
    """Return the least time of a decode step (roofline).

    max(weights / bandwidth, batch * operations / rate) + (keys, values and float32 logits) / bandwidth.
    """
    read = layer_weights(shape) + shape.vocab_size * shape.n_embd
    kv = batch * context * bytes_per_token(shape, kv_dtype or dtype)
    logits = 8 * shape.vocab_size * batch
    return linear_seconds(read, dtype, batch, bandwidth, rate, quantize) + (kv + logits) / bandwidth


def layer_weights(shape: Architecture) -> int:
    """Return the number of weights in the linear layers below the head."""
    c, heads = shape.n_embd, shape.n_head * shape.head_size
    mlp = (3 if shape.gated else 2) * c * shape.inner_size
    return shape.n_layer * (c * shape.qkv_size + heads * c + mlp)


def linear_seconds(
    weights: int, dtype: torch.dtype, rows: int, bandwidth: float, rate: float, quantize: str = "none"
) -> float:
    """Return the least time in which this many weights are read and multiplied with some rows."""
    return max(weights * weight_bytes(dtype, quantize) / bandwidth, rows * 2 * weights / rate)


def describe() -> dict[str, Any]:
    """Return date, processor, threads and versions, but no user names or paths."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "processor": name,
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
