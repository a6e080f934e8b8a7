"""What serves on this device: each fast way has to agree with the plain one at the start, or the plain one serves.

The plain ways are far slower and never wrong, so a card, a driver or a version of Triton that nobody has tried costs
speed and a warning, not a text. It must not know layers or requests.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from generate.gpu.attention import DecodeAttention, FlashPrompts, PlainPrompts, Prompts, TorchDecode
from generate.gpu.layers import FusedMath, Layer, Norm, PlainMath, StrictMath

T = TypeVar("T")
log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def make_decode(rows: int, tables: int, pool: torch.Size, dtype: torch.dtype, device: torch.device) -> DecodeAttention:
    """Return decode attention for `rows` page tables of `tables` pages, over pools [pages, H, P, D]."""
    if device.type != "cuda":
        return TorchDecode()

    def fast() -> tuple[DecodeAttention, float]:
        from generate.gpu.triton_attention import TritonDecode

        attend = TritonDecode(rows, tables, pool[1], pool[3], device)
        return attend, decode_error(attend, TorchDecode(), (min(rows, 3), tables), pool, dtype, device)

    return agreed(fast, dtype, "decode attention") or TorchDecode()


def make_prompts(pool: torch.Size, dtype: torch.dtype, device: torch.device) -> PlainPrompts:
    """Return attention of prompts over pools [pages, H, P, D]: flash attention for 16 bits on a GPU."""
    if device.type != "cuda" or dtype == torch.float32 or pool[3] % 8:
        return PlainPrompts()

    def fast() -> tuple[PlainPrompts, float]:
        return FlashPrompts(), prompts_error(FlashPrompts(), PlainPrompts(), pool, dtype, device)

    return agreed(fast, dtype, "attention of prompts") or PlainPrompts()


def make_math(strict: bool, activation: str, dtype: torch.dtype, device: torch.device) -> PlainMath:
    """Return the layers' arithmetic; `strict` makes a row's bits independent of its company, and has no plain way."""
    if strict:
        return StrictMath()
    if device.type != "cuda":
        return PlainMath()

    def fast() -> tuple[PlainMath, float]:
        return FusedMath(), math_error(FusedMath(), PlainMath(), activation, dtype, device)

    return agreed(fast, dtype, "the layers' arithmetic") or PlainMath()


def agreed(make: Callable[[], tuple[T, float]], dtype: torch.dtype, what: str) -> T | None:
    """Return what `make` makes if it runs and is off by little enough, else None and a warning.

    `EB_KERNELS=off` in the environment asks for plain PyTorch.
    """
    if os.environ.get("EB_KERNELS") == "off":
        return None
    try:
        made, error = make()
    # Triton raises whatever its compiler does; the plain way still serves.
    except Exception as failure:
        log.warning("%s falls back to plain PyTorch, which is much slower: %s", what, failure)
        return None
    if error < TOLERANCE[dtype]:  # not so for NaN
        return made
    log.warning("%s falls back to plain PyTorch: the fast kernel is off by %.2g", what, error)
    return None


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Return the same normal numbers on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _difference(got: Tensor, expected: Tensor) -> float:
    """Return the largest error, of large numbers in proportion to them, as rounding is."""
    return float(((got - expected).abs() / (1 + expected.abs())).max())


def decode_error(
    attend: DecodeAttention, other: DecodeAttention, tables: tuple[int, int], pool: torch.Size,
    dtype: torch.dtype, device: torch.device,
) -> float:  # fmt: skip
    """Return the largest difference of two ways on a small ragged step: one page, all pages, and a padding row."""
    rows, pages = tables
    _, heads, size, width = pool
    lengths = torch.tensor([size * pages - 3, 1, 0][:rows], device=device)
    owned = torch.arange(rows * pages).view(rows, pages) + 1
    owned[2:] = 0
    keys, values = (noise(1 + rows * pages, heads, size, width, seed=i).to(device, dtype) for i in (1, 2))
    qkv = noise(rows, 3 * heads * width).to(device, dtype)
    got, expected = (
        way(qkv, keys.clone(), values.clone(), lengths, owned.to(device), width**-0.5).float()
        for way in (attend, other)
    )
    return _difference(got[lengths > 0], expected[lengths > 0])


def prompts_error(
    attend: PlainPrompts, other: PlainPrompts, pool: torch.Size, dtype: torch.dtype, device: torch.device
) -> float:
    """Return the largest difference of two ways on two pieces, of which one has a past of two pages and more."""
    _, heads, size, width = pool
    new, past = 40, 2 * size + 4
    queries, contexts = [0, 5, 5 + new], [0, 5, 5 + past + new]
    places = torch.cat((torch.arange(5), size + torch.arange(past + new)))
    owned = torch.stack((places // size, places % size)).to(device)
    fresh = torch.cat((owned[:, :5], owned[:, -new:]), 1)
    cuts = torch.tensor([queries, contexts], dtype=torch.int32, device=device)
    prompts = Prompts(queries, contexts, cuts, fresh[0], fresh[1], owned)
    pages = 2 + contexts[-1] // size
    keys, values = (noise(pages, heads, size, width, seed=i).to(device, dtype) for i in (1, 2))
    qkv = noise(queries[-1], 3 * heads * width).to(device, dtype)
    got, expected = (way(qkv, keys.clone(), values.clone(), prompts, width**-0.5).float() for way in (attend, other))
    return _difference(got, expected)


def math_error(way: PlainMath, other: PlainMath, activation: str, dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest difference of two ways through a norm, a linear layer and a head."""
    rows, width, wide = 3, 64, 80
    x = noise(rows, width).to(device, dtype)
    norm = Norm(*(noise(width, seed=i).to(device) for i in (1, 2)), 1e-5)
    weight, bias = noise(wide, width, seed=3) / 8, noise(wide, seed=4) / 8
    layer = Layer(weight.to(device, dtype), bias.to(device, dtype), activation)
    results = []
    for one in (way, other):
        residual = noise(rows, width, seed=5).to(device)
        y = one.linear(one.add_norm(residual, x, norm, dtype), layer)
        logits = one.head(y[:, :width], one.prepare_head(layer.weight))[:, :wide]
        results.append(torch.cat((residual, y.float(), logits), 1))
    return _difference(*results)
