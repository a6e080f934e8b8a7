"""From logits to tokens: greedy, temperature, top-k and top-p, one rule on every device and for every policy.

A token is drawn by inverting the distribution's cumulative sum at one uniform number that is keyed by the request's
seed and the token's position. So a request's text depends on the request alone: not on its neighbours, not on the
policy, not on the order of steps. It must not know batches beyond "these rows".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MASK = (1 << 64) - 1
CANDIDATES = 256  # top-k and top-p look at so many largest logits before they sort a whole row


class NotFinite(ValueError):
    """A row of logits holds NaN or infinity: the model broke on this request."""

    def __init__(self) -> None:
        super().__init__("the model's output for this request is not finite")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request draws its tokens. Temperature 0 is greedy; top_k 0 and top_p 1 filter nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @property
    def is_filtered(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


GREEDY = SamplingParams(temperature=0.0)


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that draws the token at `position` (splitmix64, Steele et al. 2014)."""
    z = (seed * 0xD1342543DE82EF95 + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = ((z ^ (z >> shift)) * factor) & MASK
    return ((z ^ (z >> 31)) >> 11) / (1 << 53)


def sample(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int | NotFinite]:
    """Return a token for each row of float32 logits (R, V), or what is wrong with the row.

    `positions[i]` is the place in the context that the new token of row i takes.
    """
    best, tokens = logits.max(dim=1)
    result: list[int | NotFinite] = tokens.tolist()
    plain = [i for i, p in enumerate(params) if p.temperature > 0 and not p.is_filtered]
    if plain:
        rows = logits if len(plain) == len(params) else logits[plain]
        heat = torch.tensor([[1 / params[i].temperature] for i in plain], device=logits.device)
        where = [uniform(params[i].seed, positions[i]) for i in plain]
        for i, token in zip(plain, _invert(torch.softmax(rows * heat, dim=1), where)):
            result[i] = token
    for i, p in enumerate(params):
        if p.is_filtered:
            result[i] = _sample_filtered(logits[i], p, uniform(p.seed, positions[i]))
    for i, value in enumerate(best.tolist()):
        if not math.isfinite(value):
            result[i] = NotFinite()
    return result


def _invert(probabilities: Tensor, where: Sequence[float]) -> list[int]:
    """Return for each row the first index at which the cumulative sum exceeds `where` of the whole."""
    sums = probabilities.cumsum(dim=1)
    goal = torch.tensor(where, device=sums.device, dtype=sums.dtype)[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, goal, right=True).clamp_(max=sums.shape[1] - 1)[:, 0].tolist()


def _sample_filtered(row: Tensor, p: SamplingParams, u: float) -> int:
    """Draw from the top-k, then top-p part of one row; equal logits rank by id, lowest first."""
    scaled = row / p.temperature
    k = min(p.top_k or row.shape[0], row.shape[0])
    size = min(k, CANDIDATES) if p.top_p < 1 or k <= CANDIDATES else k
    values, ids = scaled.topk(size)
    if p.top_p < 1:
        whole = scaled.logsumexp(0) if k == row.shape[0] else None
        if whole is None and size < k:
            values, ids = scaled.topk(k)
        mass = torch.softmax(values, 0) if whole is None else (values - whole).exp()
        sums = mass.cumsum(0)
        if float(sums[-1]) < p.top_p and len(values) < k:  # a flat row: few candidates do not do
            values, ids = scaled.topk(k)
            mass = (values - whole).exp() if whole is not None else torch.softmax(values, 0)
            sums = mass.cumsum(0)
        keep = int((sums < p.top_p).sum()) + 1  # the token that crosses the threshold is kept
        values, ids = values[:keep], ids[:keep]
    ids, order = ids.sort()  # the draw goes by id, so that ties cannot reorder it
    return int(ids[_invert(torch.softmax(values[order], 0)[None], [u])[0]])
