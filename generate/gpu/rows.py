"""The state of decoding rows on the device: a step reads and moves it without asking the host.

All of it lies in one buffer, so that new members come by one copy. It must not know the model or when steps run.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from generate.gpu.sampling import heat_of, key_of
from scheduling.sequence import Sequence

INTEGERS, FLOATS = 5, 2  # fields of a row beside its page table


def upload(numbers: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device; from pinned memory it does not wait for what the device is doing."""
    if device.type != "cuda" or not numbers.numel():
        return numbers.to(device)
    # PyTorch hands the pinned block out again only when the copy is done.
    return numbers.pin_memory().to(device, non_blocking=True)


class Rows:
    """`capacity` rows of a page table of `pages` each; a row of length 0 is nobody's.

    token: the token to decode. length: tokens with it. moves: 1, or 0 for a row that computes its token in vain
    and stays, and for nobody's. key: of the seed. heat: 1 / temperature, 0 for greedy. All int64, heat and top_p
    float64.
    """

    def __init__(self, capacity: int, pages: int, device: torch.device) -> None:
        self.capacity, self.pages, self.device = capacity, pages, device
        self.buffer = torch.zeros(capacity * (INTEGERS + FLOATS + pages), dtype=torch.int64, device=device)
        cut = INTEGERS * capacity, FLOATS * capacity
        integers, floats, tables = self.buffer.split((*cut, capacity * pages))
        self.token, self.length, self.moves, self.key, self.top_k = integers.view(-1, capacity)
        self.heat, self.top_p = floats.view(torch.float64).view(-1, capacity)
        self.tables = tables.view(capacity, pages)

    def write(self, sequences: Many[Sequence], held: Many[Sequence] = ()) -> None:
        """Put these into the first rows, each to decode its last token; `held` ones compute theirs again, in vain."""
        members = [*sequences, *held]
        idle = [0] * (self.capacity - len(members))
        live = len(sequences)
        params = [seq.sampling for seq in members]
        places = [s.computed - (i >= live) for i, s in enumerate(members)]
        integers = [
            [s.tokens(place, 1)[0] for s, place in zip(members, places)],
            [place + 1 for place in places],
            [int(i < live) for i in range(len(members))],
            [key_of(p.seed) for p in params],
            [p.top_k for p in params],
        ]
        floats = [[heat_of(p) for p in params], [p.top_p for p in params]]
        tables = [s.pages + [0] * (self.pages - len(s.pages)) for s in members]
        parts = (
            torch.tensor([numbers + idle for numbers in integers]),
            torch.tensor([numbers + idle for numbers in floats], dtype=torch.float64).view(torch.int64),
            torch.tensor(tables + [[0] * self.pages] * len(idle)),
        )
        self.buffer.copy_(upload(torch.cat([part.view(-1) for part in parts]), self.device))

    def keep(self, rows: Many[int]) -> None:
        """Make every other row nobody's."""
        kept = torch.zeros(self.capacity, dtype=torch.int64)
        kept[list(rows)] = 1
        here = upload(kept, self.device)
        self.length.mul_(here)
        self.moves.mul_(here)
        self.tables.mul_(here[:, None])
