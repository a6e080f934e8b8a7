"""Pieces of prompts on the device: one packed row of tokens, one copy from the host and one replay.

The row is padded to the size of a bucket, whose step is recorded as a graph. A graph reads fixed addresses, so the tokens,
positions and tiles of each step are copied into one buffer first. A row that fits no bucket is launched kernel by kernel.

It must not know sampling, decodes, policies or how attention is computed.
"""

from __future__ import annotations

import bisect
import collections.abc as abc
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from generate.gpu.attention import TILE, Pieces, PromptAttention, cut
from generate.gpu.graphs import GraphReplayer, Replayer, recorded
from generate.gpu.layers import Attend
from generate.gpu.rows import upload
from models.architecture import Reach
from scheduling.sequence import Sequence

BUCKETS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  # tokens
SHORT = 128  # tiles beyond those of one long piece, for short ones; a launch waits a little for those without work
States = Callable[[Tensor, Tensor, Attend], Tensor]  # ids, positions, attention: the states of each row


class Prefill:
    """Compute pieces of prompts with at most `context_pages` pages each, in pools [layers, pages, KV, P, D]."""

    def __init__(
        self, states: States, attend: PromptAttention, keys: Tensor, values: Tensor, context_pages: int
    ) -> None:
        self._states, self.attend, self._keys, self._values = states, attend, keys, values
        most = BUCKETS[-1]
        numbers = 2 * most + (4 + context_pages) * _tiles_of(most)
        self._buffer = torch.zeros(numbers, dtype=torch.int64, device=keys.device)
        can_record = keys.device.type == "cuda" and attend.name == "triton"
        self.replayer: Replayer = (GraphReplayer if can_record else Replayer)(self._step, BUCKETS)

    def warm_up(self) -> None:
        """Record every bucket, without work."""
        self._buffer.zero_()
        self.replayer = recorded(self.replayer, "prompts")

    def compute(
        self, ids: list[int], positions: list[int], sequences: abc.Sequence[Sequence], counts: abc.Sequence[int]
    ) -> Tensor:
        """Return the states [M, C] of tokens at positions, valid until the next step; M is at least len(ids).

        They are the next `counts[i]` tokens of each sequence in turn, whose keys and values are written, and padding.
        """
        size = self._keys.shape[3]
        tiles, pages = cut([seq.computed for seq in sequences], counts, [seq.pages for seq in sequences], size)
        at = bisect.bisect_left(BUCKETS, len(ids))
        bucket = BUCKETS[at] if at < len(BUCKETS) else 0
        fits = len(tiles) <= 4 * _tiles_of(bucket)
        rows, most = (bucket, 4 * _tiles_of(bucket)) if fits else (len(ids), len(tiles))
        numbers = [*ids, *[0] * (rows - len(ids)), *positions, *[0] * (rows - len(ids))]
        numbers += [*tiles, *[0] * (most - len(tiles)), *pages]
        fresh = upload(torch.tensor(numbers), self._buffer.device)
        if not fits:
            return self._compute(fresh, rows, most)
        self._buffer[: len(fresh)].copy_(fresh)
        return self.replayer.run(rows)

    def _step(self, size: int) -> Tensor:
        return self._compute(self._buffer, size, 4 * _tiles_of(size))

    def _compute(self, numbers: Tensor, rows: int, tiles: int) -> Tensor:
        sizes = [rows, rows, tiles, len(numbers) - 2 * rows - tiles]
        ids, positions, cuts, pages = torch.split(numbers, sizes)
        return self._states(ids, positions, functools.partial(self._attend, Pieces(cuts.view(-1, 4), pages)))

    def _attend(self, pieces: Pieces, layer: int, qkv: Tensor, scale: float, reach: Reach) -> Tensor:
        return self.attend(qkv, self._keys[layer], self._values[layer], pieces, scale, reach)


def _tiles_of(bucket: int) -> int:
    """Return the tiles that a bucket has; any pieces of together `bucket` tokens fit if they are not more than SHORT."""
    return bucket // TILE + min(bucket, SHORT)
