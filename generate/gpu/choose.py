"""The choice of implementations for this device: a fast one serves if it agrees at the start and, if timed, wins.

The plain implementations are far slower and never wrong, so an untested card, driver or version of Triton costs speed
and a warning, but never changes a text. It must not know layers or requests.
"""

from __future__ import annotations

import logging
import timeit
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from generate.gpu import card
from generate.gpu.attention import (
    TILE,
    DecodeAttention,
    DecodeRows,
    Pieces,
    PromptAttention,
    TorchDecode,
    TorchPrompts,
    cut,
)
from generate.gpu.graphs import GraphReplayer
from generate.gpu.layers import FusedMath, Layer, Norm, PlainMath, StrictMath
from generate.gpu.sampling import FastDraw, draw
from generate.rotary import Turn, rotation_table
from models.architecture import FULL, Architecture, Reach

T = TypeVar("T")
Trial = tuple[T, float, Sequence[Callable[[], Tensor]]]  # what is tried, its error, and it and plain PyTorch to time
log = logging.getLogger(__name__)

ROUNDS = 20  # of which the shortest counts
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def make_decode(
    rows: int, pages: int, config: Architecture, pool: torch.Size, dtype: torch.dtype, device: torch.device
) -> DecodeAttention:
    """Return decode attention for `rows` block tables of `pages` pages, over pools [pages, KV, P, D]."""

    def fast() -> Trial[DecodeAttention]:
        from generate.gpu.triton_attention import TritonDecode

        attend = TritonDecode(rows, pages, config.n_head, pool[1], pool[3], device)
        case = (min(rows, 3), pages), config.n_head, pool, dtype, device
        errors = [decode_error(attend, TorchDecode(), *case, reach) for reach in config.reaches]
        return attend, float(torch.tensor(errors).max()), ()  # NaN if one is

    return agreed(fast, dtype, "decode attention", device) or TorchDecode()


def make_prompts(config: Architecture, pool: torch.Size, dtype: torch.dtype, device: torch.device) -> PromptAttention:
    """Return attention of prompts over pools [pages, KV, P, D]."""

    def fast() -> Trial[PromptAttention]:
        from generate.gpu.triton_prompts import TritonPrompts

        attend = TritonPrompts()
        case = config.n_head, pool, dtype, device
        errors = [prompts_error(attend, TorchPrompts(), *case, reach) for reach in config.reaches]
        return attend, float(torch.tensor(errors).max()), ()

    return agreed(fast, dtype, "attention of prompts", device) or TorchPrompts()


def make_math(strict: bool, config: Architecture, dtype: torch.dtype, device: torch.device) -> PlainMath:
    """Return the layers' arithmetic; `strict` makes a row's bits independent of the batch, and has no fallback."""
    if strict:
        return StrictMath()

    def fast() -> Trial[PlainMath]:
        return FusedMath(), math_error(FusedMath(), PlainMath(), config, dtype, device), ()

    return agreed(fast, dtype, "the layers' arithmetic", device) or PlainMath()


def make_draw(vocabulary: int, device: torch.device) -> FastDraw | None:
    """Return kernels that draw as `sampling.draw` does without filters, None where that is to draw itself."""

    def fast() -> Trial[FastDraw]:
        from generate.gpu.triton_sampling import draw as fast_draw

        keys = torch.arange(16, device=device)
        case = 3 * noise(len(keys), vocabulary).to(device), keys, keys, (keys % 4).double() / 2
        calls: list[Callable[[], Tensor]] = [lambda: fast_draw(*case), lambda: draw(*case, *case[2:], "plain")]
        return fast_draw, float(not torch.equal(*(call() for call in calls))), calls

    return agreed(fast, torch.float32, "drawing", device)


def agreed(make: Callable[[], Trial[T]], dtype: torch.dtype, part: str, device: torch.device) -> T | None:
    """Return what `make` does on a GPU, if its error is within the tolerance and its first call is not the slower one.

    Otherwise log the reason. Raises what `card.raise_if_lost` does; then plain PyTorch cannot serve either.
    """
    if device.type != "cuda" or card.is_plain():
        return None
    try:
        fast, error, calls = make()
        times = [seconds(call) for call in calls]
    # Triton's compiler raises errors of many types; the plain implementation still serves.
    except Exception as failure:
        card.raise_if_lost(failure)
        log.warning("%s falls back to plain PyTorch, which is much slower: %s", part, failure)
        return None
    if times and times[0] > times[1]:
        log.info("%s stays plain: the fast kernel takes %.2f times as long", part, times[0] / times[1])
        return None
    if error < TOLERANCE[dtype]:  # false for NaN
        log.info("%s: the fast kernel is off by %.1e, at most %.1e", part, error, TOLERANCE[dtype])
        return fast
    log.warning("%s falls back to plain PyTorch: the fast kernel is off by %.2g", part, error)
    return None


def seconds(call: Callable[[], Tensor]) -> float:
    """Return the shortest time of a call that is recorded as steps are, without the launches of its kernels."""
    replayer = GraphReplayer(lambda rows: call(), [0])
    replayer.record()
    return min(timeit.repeat(lambda: replayer.run(0).cpu(), number=1, repeat=ROUNDS))  # .cpu() waits for it


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Return the same normal numbers on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _difference(output: Tensor, expected: Tensor) -> float:
    """Return the largest error, absolute for small numbers and relative for large ones, as rounding is."""
    return float(((output - expected).abs() / (1 + expected.abs())).max())


def decode_error(
    attend: DecodeAttention, other: DecodeAttention, shape: tuple[int, int], heads: int, pool: torch.Size,
    dtype: torch.dtype, device: torch.device, reach: Reach = FULL,
) -> float:  # fmt: skip
    """Return the largest difference of two implementations on a small step with block tables of `shape`.

    The step has a row of all pages, one of one page, and an unused one.
    """
    n, pages = shape
    _, kv_heads, size, width = pool
    context_lens = torch.tensor([size * pages - 3, 1, 0][:n], device=device)
    block_tables = torch.zeros(n, pages, dtype=torch.int64)
    block_tables[0] = torch.arange(pages) + 1
    block_tables[1:2, 0] = pages + 1
    rows = DecodeRows(context_lens, block_tables.to(device))
    keys, values = (noise(2 + pages, kv_heads, size, width, seed=i).to(device, dtype) for i in (1, 2))
    qkv = noise(n, (heads + 2 * kv_heads) * width).to(device, dtype)
    output, expected = (
        implementation(qkv, keys.clone(), values.clone(), rows, width**-0.5, reach).float()
        for implementation in (attend, other)
    )
    return _difference(output[context_lens > 0], expected[context_lens > 0])


def prompts_error(
    attend: PromptAttention, other: PromptAttention, heads: int, pool: torch.Size, dtype: torch.dtype,
    device: torch.device, reach: Reach = FULL,
) -> float:  # fmt: skip
    """Return the largest difference of two implementations, in attention and pages, with an unused tile and padding.

    A piece has a past of more than two pages and more than one tile, and another is short.
    """
    _, kv_heads, size, width = pool
    past, counts = 2 * size + 4, [5, TILE + 40]
    pages = 2 + (past + counts[1]) // size
    tiles, used = cut([0, past], counts, [[0], [*range(pages - 1, 0, -1)]], size)
    pieces = Pieces(torch.tensor([*tiles, 0, 0, 0, 0]).view(-1, 4).to(device), torch.tensor(used).to(device))
    qkv = noise(sum(counts) + 3, (heads + 2 * kv_heads) * width).to(device, dtype)
    results = []
    for implementation in (attend, other):
        keys, values = (noise(pages, kv_heads, size, width, seed=i).to(device, dtype) for i in (1, 2))
        output = implementation(qkv, keys, values, pieces, width**-0.5, reach)[: sum(counts)]
        results.append(torch.cat([part.flatten().float() for part in (output, keys, values)]))
    return _difference(*results)


def math_error(
    way: PlainMath, other: PlainMath, config: Architecture, dtype: torch.dtype, device: torch.device
) -> float:
    """Return the largest difference of two implementations through the parts of a model with the switches of `config`.

    A norm, a linear layer with the activation, a head; and the rotation of all heads, where there is one.
    """
    rows, width, wide = 3, 64, 80 * (1 + config.gated)
    x = noise(rows, width).to(device, dtype)
    norm = Norm(noise(width, seed=1).to(device), noise(width, seed=2).to(device), config.norm_epsilon)
    if config.norm == "rms":
        norm = Norm(norm.weight.to(dtype), None, config.norm_epsilon)
    weight, bias = noise(wide, width, seed=3) / 8, noise(wide, seed=4) / 8
    bias_there = bias.to(device, dtype) if config.mlp_bias else None
    layer = Layer(weight.to(device, dtype), bias_there, config.activation, config.gated)
    results = []
    for math in (way, other):
        residual = noise(rows, width, seed=5).to(device)
        y = math.linear(math.add_norm(residual, x, norm, dtype), layer)
        logits = math.head(y[:, :width], math.prepare_head(layer.weight))[:, :wide]
        parts = [residual, y.float(), logits]
        if config.rope is not None:
            parts.append(_turned(math, config, dtype, device))
        results.append(torch.cat(parts, 1))
    return _difference(*results)


def _turned(math: PlainMath, config: Architecture, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return queries, keys and values of three positions after head norms and rotation, float32."""
    assert config.rope is not None
    table = rotation_table(config.rope, config.head_size, config.block_size)
    positions = torch.tensor([0, config.block_size // 2, config.block_size - 1])
    H, KV, D = config.n_head, config.n_kv_head, config.head_size
    width = (H + KV if config.whole_qk_norm else 2) * D
    norms = noise(width, seed=6).to(device, dtype) if config.qk_norm else None
    turn = Turn(H, KV, D, norms, config.norm_epsilon)
    qkv = noise(len(positions), config.qkv_size, seed=7).to(device, dtype)
    return math.turn(qkv, table[positions].to(device), turn).float()
