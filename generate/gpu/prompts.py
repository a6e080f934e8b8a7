"""Pieces of prompts as packed rows on the device: where their new keys and values go, and where their past lies.

It must not know layers, sampling, or who owns a page.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from generate.gpu.attention import Prompts
from generate.gpu.rows import upload
from scheduling.sequence import Sequence

TOKENS_AT_ONCE = 1 << 16  # whose keys and values are copied for one call of attention; one piece may have more


def lay_out(sequences: Many[Sequence], counts: Many[int], page_size: int, device: torch.device) -> list[Prompts]:
    """Return the rows of the next `counts[i]` tokens of `sequences[i]`, in as few parts as the memory allows."""
    context_lens = [seq.computed + count for seq, count in zip(sequences, counts)]
    parts = []
    for part in _batches(context_lens, TOKENS_AT_ONCE):
        parts.append(_prompts(sequences[part], counts[part], page_size, device))
    return parts


def _batches(sizes: Many[int], most: int) -> Iterator[slice]:
    """Yield slices of neighbors whose sizes sum up to `most`, or of one that is larger."""
    first = total = 0
    for i, size in enumerate(sizes):
        if i > first and total + size > most:
            yield slice(first, i)
            first, total = i, 0
        total += size
    yield slice(first, len(sizes))


def _prompts(sequences: Many[Sequence], counts: Many[int], size: int, device: torch.device) -> Prompts:
    slots = [_slots(seq, seq.computed + count, size) for seq, count in zip(sequences, counts)]
    fresh = upload(torch.cat([own[len(own) - count :] for own, count in zip(slots, counts)]), device)
    past = None
    if any(seq.computed for seq in sequences):
        every = upload(torch.cat(slots), device)
        past = torch.stack((every // size, every % size))
    cu_seqlens_q = [0, *itertools.accumulate(counts)]
    cu_seqlens_k = [0, *itertools.accumulate(map(len, slots))]
    cu_seqlens = upload(torch.tensor([cu_seqlens_q, cu_seqlens_k], dtype=torch.int32), device)
    return Prompts(cu_seqlens_q, cu_seqlens_k, cu_seqlens, fresh // size, fresh % size, past)


def _slots(seq: Sequence, length: int, size: int) -> Tensor:
    """Return page * size + offset of the first `length` tokens, int64 on the host."""
    pages = torch.tensor(seq.pages[: -(-length // size)])
    return (pages[:, None] * size + torch.arange(size)).flatten()[:length]
