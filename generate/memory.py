"""Memory for weights and KV pages, in huge pages where the system has them.

Every step streams gigabytes of them. With pages of 4 KiB the processor looks up an address every 4 KiB, and its own
prefetching stops there. It must not know layers, or who owns a page.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from models.architecture import Architecture

HUGE = 2 << 20  # bytes; smaller tensors gain nothing
SCALE_BYTES = 4  # of a float32 scale, behind the numbers of a token and head in an 8-bit pool


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return an uninitialized tensor, in huge pages if it is large, on the CPU, and the system has them."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    on_cpu = device is None or device.type == "cpu"
    if not on_cpu or size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    space = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        space.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return torch.empty(shape, dtype=dtype)
    whole = torch.frombuffer(space, dtype=torch.uint8)  # keeps `space` alive
    start = -whole.data_ptr() % HUGE
    return whole[start : start + size].view(dtype).view(shape)


def kv_row_size(head_size: int, dtype: torch.dtype) -> int:
    """Return the elements of one token's key or value of one head; in an 8-bit pool the scale is among them."""
    return head_size + SCALE_BYTES if dtype == torch.int8 else head_size


def kv_pools(
    shape: Architecture, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return uninitialized pools of keys and values (layers, pages, KV heads, page size, row size)."""
    size = (shape.n_layer, pages, shape.n_kv_head, page_size, kv_row_size(shape.head_size, dtype))
    return empty(size, dtype, device), empty(size, dtype, device)
