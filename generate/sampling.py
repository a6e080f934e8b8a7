"""From logits to tokens: one rule on every device and for every policy.

The order is: penalties and bias, temperature, top-k, top-p, typical-p, min-p, draw. A token is drawn by inverting the
distribution's cumulative sum at one uniform number, which is keyed by the request's seed and the token's position. So a
request's text depends on the request alone: not on its neighbors, the policy or the order of steps. It must not know
batches beyond the rows that it gets.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from generate.constraint import Masks, fill
from generate.cpu.declarations import declarations
from generate.cpu.team import load_unless_off
from generate.grammar import FormError
from generate.params import SamplingParams

MASK = (1 << 64) - 1
NOTHING = -2  # instead of a token: the form of the answer allows none
CANDIDATES = 256  # largest logits that top-k and top-p look at before they sort a whole row


class NotFinite(ValueError):
    """A row of logits holds NaN or infinity: the model broke on this request."""

    def __init__(self) -> None:
        super().__init__("the model's output for this request is not finite")


class TokenLogprobs(NamedTuple):
    """The natural log of a token's probability under the model alone, and the likeliest (id, log) pairs.

    `rank` is 1 for the likeliest token, and equal for equally likely tokens; None unless it was requested.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = None


class History(NamedTuple):
    """The tokens that penalties depend on."""

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that draws the token at `position` (splitmix64, Steele et al. 2014)."""
    z = (seed * 0xD1342543DE82EF95 + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = ((z ^ (z >> shift)) * factor) & MASK
    return ((z ^ (z >> 31)) >> 11) / (1 << 53)


Failure = NotFinite | FormError  # why a row has no token


class Draws:
    """The drawing parameters of some rows, laid out once for as many steps as the same requests stay together."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> None:
        self.params = params
        self._special = [i for i, p in enumerate(params) if p.is_processed or p.is_filtered]  # rows that Python draws
        self._bound = {i: k for k, i in enumerate([i for i, p in enumerate(params) if p.grammar is not None])}
        # A special row is first drawn greedily with the others, which also finds rows that are not finite.
        inverse = [0.0 if p.is_processed or p.is_filtered else p.inverse_temperature for p in params]
        self._max_logits = declarations().constants["MAX_LOGITS"]
        self._warm = [i for i, factor in enumerate(inverse) if factor]
        self._inverse_temperatures = torch.tensor(inverse, device=device)
        self._seeds = torch.tensor([signed(p.seed) for p in params], device=device)

    def draw(self, logits: Tensor, positions: Tensor, history: Callable[[int], History]) -> Sequence[int | Failure]:
        """Return a token for each row of float32 logits (R, V), or why a row has none; the logits stay as they are.

        `positions` (R), int64, are those of the new tokens in their contexts; `history(i)` is called where row i is
        processed (penalties, bias, minimum) or has a form. Rows of one form follow each other, each with a token more.
        """
        masks = None
        if self._bound:
            masks = fill([self.params[i].grammar for i in self._bound], [history(i).output_ids for i in self._bound])
        tokens = self._draw_plain(logits, positions, masks)
        for i in self._special:
            p = self.params[i]
            if tokens[i] < 0:
                continue
            row = _process(logits[i], p, history(i)) if p.is_processed else logits[i]
            if masks is not None and i in self._bound:
                row = _restrict(row, logits[i], masks, self._bound[i])
            if p.temperature > 0:
                tokens[i] = _draw(row, p, uniform(p.seed, int(positions[i])))
            else:
                tokens[i] = int(row.argmax())
        if min(tokens, default=0) < 0 or (masks is not None and masks.errors):
            return [self._outcome(i, token, masks) for i, token in enumerate(tokens)]
        return tokens

    def _outcome(self, row: int, token: int, masks: Masks | None) -> int | Failure:
        error = masks.errors.get(self._bound[row]) if masks is not None and row in self._bound else None
        if error is None and token == NOTHING:
            error = self.params[row].grammar.error()
        return error or (NotFinite() if token < 0 else token)

    def _draw_plain(self, logits: Tensor, positions: Tensor, masks: Masks | None) -> list[int]:
        """Return each row's token as if nothing were processed or filtered, -1 where the row is not finite, or `NOTHING`."""
        library = _library() if logits.device.type == "cpu" else None
        if library is not None and logits.shape[1] <= self._max_logits:
            logits = logits.contiguous()
            out = torch.empty(len(logits), dtype=torch.int64)
            addresses = None
            if masks is not None:
                addresses = torch.zeros(len(logits), dtype=torch.int64)
                first, stride = masks.bits.ctypes.data, masks.bits.strides[0]
                addresses[[*self._bound]] = torch.arange(first, first + stride * len(self._bound), stride)
            library.sample_tokens(
                logits.data_ptr(), *logits.shape, self._inverse_temperatures.data_ptr(), self._seeds.data_ptr(),
                positions.data_ptr(), None if addresses is None else addresses.data_ptr(), out.data_ptr(),
            )  # fmt: skip
            return out.tolist()
        if masks is not None:
            finite = logits.isfinite().all(dim=1).tolist()
            whole, logits = logits, logits.clone()
            for i, k in self._bound.items():
                logits[i] = _restrict(whole[i], whole[i], masks, k)
        best, greedy = logits.max(dim=1)
        tokens: list[int] = greedy.tolist()
        warm = self._warm
        if warm:
            probabilities = torch.softmax(logits[warm] * self._inverse_temperatures[warm][:, None], dim=1)  # (W, V)
            uniforms = [uniform(self.params[i].seed, int(positions[i])) for i in warm]
            for i, token in zip(warm, _invert(probabilities, uniforms)):
                tokens[i] = token
        if masks is not None:
            found = zip(tokens, best.tolist(), finite)
            return [-1 if not whole else t if math.isfinite(b) else NOTHING for t, b, whole in found]
        return [t if math.isfinite(b) else -1 for t, b in zip(tokens, best.tolist())]


def _restrict(row: Tensor, unprocessed: Tensor, masks: Masks, k: int) -> Tensor:
    """Return a row (V) in which only the tokens of mask k are possible."""
    allowed = torch.from_numpy(masks.allowed(k, len(row))).to(row.device)
    restricted = row.masked_fill(~allowed, -torch.inf)
    if math.isinf(float(restricted.max())):  # only what ends the text may follow, which `min_tokens` forbids
        return unprocessed.masked_fill(~allowed, -torch.inf)
    return restricted


def signed(number: int) -> int:
    """Return the signed integer of 64 bits with the same bits."""
    return ((number & MASK) ^ (1 << 63)) - (1 << 63)


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Sequence[int | Failure]:
    """Return `Draws.draw` for rows that are drawn together once, without a history."""
    nothing = History((), ())
    return Draws(params, logits.device).draw(logits, torch.tensor(positions, dtype=torch.int64), lambda i: nothing)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return sampler.c compiled, or None where it cannot be compiled."""
    return load_unless_off(Path(__file__).parent / "cpu" / "sampler.c", "the C sampler", "PyTorch instead")


def _process(row: Tensor, p: SamplingParams, history: History) -> Tensor:
    """Return the row after penalties, bias, and the ban on early endings."""
    row = row.clone()
    if p.repetition_penalty != 1:
        seen = torch.tensor(sorted({*history.prompt_ids, *history.output_ids}), device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if (p.presence_penalty or p.frequency_penalty) and history.output_ids:
        counts = Counter(history.output_ids)
        ids = torch.tensor(list(counts), device=row.device)
        times = torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)
        row[ids] -= p.presence_penalty + p.frequency_penalty * times
    for token, bias in p.logit_bias:
        row[token] += bias
    if len(history.output_ids) < p.min_tokens:
        row[list(p.banned_ids)] = -torch.inf
    return row


def _draw(row: Tensor, p: SamplingParams, u: float) -> int:
    """Draw from what the filters leave of one row; equal logits rank by id, lowest first."""
    scaled = row / p.temperature
    values, ids = _candidates(scaled, p)
    if p.typical_p < 1:
        values, ids = _typical(values, ids, p.typical_p)
    if p.min_p > 0:
        keep = values >= values.max() + math.log(p.min_p)
        values, ids = values[keep], ids[keep]
    ids, order = ids.sort()  # the draw goes by id, so that ties cannot reorder it
    return int(ids[_invert(torch.softmax(values[order], 0)[None], [u])[0]])


def _candidates(scaled: Tensor, p: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return values and ids of the top-k and top-p part, largest first, without sorting more than necessary."""
    vocabulary = len(scaled)
    k = min(p.top_k or vocabulary, vocabulary)
    if p.top_p >= 1 and k == vocabulary:
        return scaled, torch.arange(vocabulary, device=scaled.device)
    size = k if p.top_p >= 1 or k < vocabulary else min(CANDIDATES, k)
    values, ids = scaled.topk(size)
    if p.top_p >= 1:
        return values, ids
    whole = scaled.logsumexp(0) if k == vocabulary else values.logsumexp(0)
    sums = (values - whole).exp().cumsum(0)
    if float(sums[-1]) < p.top_p and size < k:  # a flat row: the candidates are too few
        values, ids = scaled.topk(k)
        sums = (values - whole).exp().cumsum(0)
    keep = int((sums < p.top_p).sum()) + 1  # the token that crosses the threshold is kept
    return values[:keep], ids[:keep]


def _typical(values: Tensor, ids: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    """Keep the tokens whose surprise is nearest to the entropy (Meister et al. 2022, arXiv 2202.00666)."""
    logs = torch.log_softmax(values, 0)
    probabilities = logs.exp()
    entropy = -(probabilities * logs).nan_to_num().sum()
    order = (-logs - entropy).abs().argsort(stable=True)
    keep = int((probabilities[order].cumsum(0) < mass).sum()) + 1
    return values[order[:keep]], ids[order[:keep]]


def _invert(probabilities: Tensor, where: Sequence[float]) -> list[int]:
    """Return for each row the first index at which the cumulative sum exceeds its share `where` of the total."""
    sums = probabilities.cumsum(dim=1)  # (R, V)
    goal = torch.tensor(where, device=sums.device, dtype=sums.dtype)[:, None] * sums[:, -1:]  # (R, 1)
    indices = torch.searchsorted(sums, goal, right=True)[:, 0]
    return indices.clamp_(max=sums.shape[1] - 1).tolist()


def logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int], ranks: bool = False) -> list[TokenLogprobs]:
    """Return for each row of float32 logits (R, V) the log probability of its token and of the likeliest ones.

    For the likeliest token, its value is the same number, bit for bit, as the first alternative's.
    """
    if not len(logits):
        return []
    whole = logits.logsumexp(dim=1, keepdim=True)  # (R, 1)
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])  # (R, 1)
    rank_of: list[int | None] = [None] * len(tokens)
    if ranks:  # row by row: summing a matrix of booleans takes three times as long
        rank_of = [1 + int((row > own).count_nonzero()) for row, own in zip(logits, chosen)]
    values, ids = logits.topk(max(1, *counts), dim=1)
    values = values - whole
    return [
        TokenLogprobs(token, own, tuple(zip(row_ids[:n], row[:n])), rank)
        for token, own, row, row_ids, n, rank in zip(
            tokens, (chosen - whole)[:, 0].tolist(), values.tolist(), ids.tolist(), counts, rank_of
        )
    ]
