"""Tokens drawn on the device by the rule of `generate/sampling.py`; nothing is read back, so that a graph can hold it.

Greedy, temperature, top-k and top-p are drawn here, the last two among the largest `CANDIDATES` logits. The host draws
from copied logits what needs more (penalties, bias, log probabilities, min-p, typical-p, a wide top-k), and rows whose
candidates turn out to be too few for their top-p.

It must not know requests, pages or batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from generate.params import SamplingParams
from generate.sampling import CANDIDATES, signed

FastDraw = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # logits, keys, positions and inverse of `draw`: tokens
Drawing = Literal["greedy", "plain", "filtered"]
DRAWINGS: tuple[Drawing, ...] = ("greedy", "plain", "filtered")
NOT_FINITE, TOO_FLAT = -1, -2  # instead of a token
BLOCK = 256  # columns per partial sum


def draws(params: SamplingParams) -> bool:
    """Return whether the device can draw for these parameters."""
    if params.is_processed or params.logprobs is not None:
        return False
    return not params.is_filtered or (params.min_p == 0 and params.typical_p >= 1 and params.top_k <= CANDIDATES)


def drawing_for(params: Sequence[SamplingParams]) -> Drawing:
    """Return the cheapest kind of drawing that serves all of them."""
    if any(p.is_filtered for p in params):
        return "filtered"
    return "plain" if any(p.temperature > 0 for p in params) else "greedy"


def key_of(seed: int) -> int:
    """Return the term of a seed in `uniforms`, as a signed 64-bit number."""
    return signed(seed * 0xD1342543DE82EF95)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Return `generate.sampling.uniform` of each key and position, both int64, as float64."""
    z = keys + (positions + 1) * signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ _shift(z, shift)) * signed(factor)
    return _shift(z ^ _shift(z, 31), 11).double() / (1 << 53)


def _shift(z: Tensor, count: int) -> Tensor:
    """Return the logical shift z >> count; torch's own copies the sign."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def restrict(logits: Tensor, bits: Tensor) -> Tensor:
    """Return logits [n, V] in which only the tokens are possible whose bits are set: int32 [n, ceil(V / 32)]."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    allowed = bits[:, columns >> 5] >> (columns & 31) & 1  # [n, V]
    return logits.masked_fill(allowed == 0, -torch.inf)


def draw(
    logits: Tensor, keys: Tensor, positions: Tensor, inverse: Tensor, top_k: Tensor, top_p: Tensor, drawing: Drawing,
    fast: FastDraw | None = None,
) -> Tensor:  # fmt: skip
    """Return int64 tokens of float32 logits [n, V], NOT_FINITE or TOO_FLAT.

    keys, positions: int64 [n], as in `uniforms`. inverse: float64 [n], the inverse temperature, 0 for greedy rows.
    top_k: int64 [n], 0 for all. top_p: float64 [n]. `drawing` covers all rows, see `drawing_for`. `fast` does "plain".
    """
    if drawing == "plain" and fast is not None:
        return fast(logits, keys, positions, inverse)
    best, tokens = logits.max(dim=1)  # [n]
    if drawing != "greedy":
        where = uniforms(keys, positions)  # [n]
        factor = inverse[:, None].float()  # [n, 1]
        plain = _invert(((logits - best[:, None]) * factor).exp(), where)
        tokens = torch.where(inverse > 0, plain, tokens)
        if drawing == "filtered":
            is_filtered = (inverse > 0) & ((top_k > 0) | (top_p < 1))
            filtered = _draw_filtered(logits * factor, where, top_k, top_p)
            tokens = torch.where(is_filtered, filtered, tokens)
    return torch.where(best.abs() < torch.inf, tokens, NOT_FINITE)  # false for NaN, too


def _invert(weights: Tensor, where: Tensor) -> Tensor:
    """Return for each row the first index at which the cumulative sum exceeds its share `where` of the total.

    The sums of blocks are in float64, so that 50,000 small numbers lose nothing, and only one block of each row is
    summed number by number.
    """
    n, V = weights.shape
    blocks = F.pad(weights, (0, -V % BLOCK)).view(n, -1, BLOCK)  # [n, V] -> [n, blocks, BLOCK]
    sums = blocks.sum(2, dtype=torch.float64).cumsum(1)  # [n, blocks]
    goal = where[:, None] * sums[:, -1:]  # [n, 1]
    block = (sums <= goal).sum(1, keepdim=True).clamp(max=sums.shape[1] - 1)  # [n, 1]
    before = F.pad(sums, (1, 0)).gather(1, block)  # [n, 1]: the sum of all earlier blocks
    chosen = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0]  # [n, BLOCK]
    inside = before + chosen.cumsum(1, dtype=torch.float64)
    index = (inside <= goal).sum(1).clamp(max=BLOCK - 1)  # [n]
    return (block[:, 0] * BLOCK + index).clamp(max=V - 1)


def _draw_filtered(scaled: Tensor, where: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Draw among the top-k and top-p part of each row, by id, so that ties cannot reorder the draw."""
    V = scaled.shape[1]
    values, ids = scaled.topk(min(CANDIDATES, V))  # [n, candidates]
    n = values.shape[1]
    whole_row = top_k == 0
    k = torch.where(whole_row, V, top_k)
    rank = torch.arange(n, device=scaled.device)
    kept = rank < k[:, None]
    best_k = values.masked_fill(~kept, -torch.inf)
    whole = torch.where(whole_row, scaled.logsumexp(1), best_k.logsumexp(1))
    sums = (best_k - whole[:, None]).exp().cumsum(1)
    # The token that crosses the threshold is kept.
    crossing = torch.where(top_p < 1, (sums < top_p[:, None]).sum(1) + 1, n)
    kept &= rank < crossing[:, None]
    too_flat = whole_row & (top_p < 1) & (sums[:, -1] < top_p) & (n < V)
    weights = (values - values[:, :1]).exp().double() * kept
    ids, order = ids.sort(1)
    inside = weights.gather(1, order).cumsum(1)
    goal = where[:, None] * inside[:, -1:]
    index = (inside <= goal).sum(1, keepdim=True).clamp(max=n - 1)
    return torch.where(too_flat, TOO_FLAT, ids.gather(1, index)[:, 0])
