"""The state of decoding rows on the device, which a step reads and advances without the host.

All of it lies in one buffer, so that new members need one copy. It must not know the model or when steps run.
"""

from __future__ import annotations

import collections.abc as abc

import torch
from torch import Tensor

from generate.gpu.sampling import key_of
from scheduling.sequence import Sequence

INTEGERS, FLOATS = 5, 2  # fields of a row beside its page table


def upload(numbers: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device; from pinned memory the copy does not wait for the device."""
    if device.type != "cuda" or not numbers.numel():
        return numbers.to(device)
    # PyTorch reuses the pinned block only when the copy is done.
    return numbers.pin_memory().to(device, non_blocking=True)


class Rows:
    """`capacity` rows with a block table of `pages` each; an unused row has context length 0.

    token: the token to decode. context_lens: tokens, with that one. moves: 1, or 0 for unused rows and for rows that
    compute their token again and stay. key: of the seed. inverse_temperature: 0 for greedy. All are int64;
    inverse_temperature and top_p are float64.
    """

    def __init__(self, capacity: int, pages: int, device: torch.device) -> None:
        self.capacity, self.pages, self.device = capacity, pages, device
        self.buffer = torch.zeros(capacity * (INTEGERS + FLOATS + pages), dtype=torch.int64, device=device)
        cut = INTEGERS * capacity, FLOATS * capacity
        integers, floats, tables = torch.split(self.buffer, [*cut, capacity * pages])
        self.token, self.context_lens, self.moves, self.key, self.top_k = integers.view(-1, capacity)
        self.inverse_temperature, self.top_p = floats.view(torch.float64).view(-1, capacity)
        self.block_tables = tables.view(capacity, pages)

    def write(self, sequences: abc.Sequence[Sequence], held: abc.Sequence[Sequence] = ()) -> None:
        """Put these into the first rows, each to decode its last token; `held` ones compute theirs again."""
        members = [*sequences, *held]
        unused = [0] * (self.capacity - len(members))
        live = len(sequences)
        params = [seq.sampling for seq in members]
        positions = [s.computed - (i >= live) for i, s in enumerate(members)]
        integers = [
            [s.tokens(position, 1)[0] for s, position in zip(members, positions)],
            [position + 1 for position in positions],
            [int(i < live) for i in range(len(members))],
            [key_of(p.seed) for p in params],
            [p.top_k for p in params],
        ]
        floats = [[p.inverse_temperature for p in params], [p.top_p for p in params]]
        tables = [s.pages + [0] * (self.pages - len(s.pages)) for s in members]
        parts = (
            torch.tensor([numbers + unused for numbers in integers]),
            torch.tensor([numbers + unused for numbers in floats], dtype=torch.float64).view(torch.int64),
            torch.tensor(tables + [[0] * self.pages] * len(unused)),
        )
        self.buffer.copy_(upload(torch.cat([part.view(-1) for part in parts]), self.device))

    def extend(
        self, rows: abc.Sequence[int], sequences: abc.Sequence[Sequence], page_counts: abc.Sequence[int]
    ) -> None:
        """Add to the tables of these rows the pages that their sequences have beyond `page_counts`."""
        where = [
            (row, column, seq.pages[column])
            for row, seq, count in zip(rows, sequences, page_counts)
            for column in range(count, len(seq.pages))
        ]
        row, column, page = upload(torch.tensor(where).T.contiguous(), self.device)
        self.block_tables[row, column] = page

    def keep(self, rows: abc.Sequence[int]) -> None:
        """Make every other row unused."""
        kept = torch.zeros(self.capacity, dtype=torch.int64)
        kept[list(rows)] = 1
        here = upload(kept, self.device)
        self.context_lens.mul_(here)
        self.moves.mul_(here)
        self.block_tables.mul_(here[:, None])
