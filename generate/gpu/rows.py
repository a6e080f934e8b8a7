"""The state of decoding rows on the device, which a step reads and advances without the host.

All of it lies in one buffer, so that new members need one copy. The host keeps its own image of the buffer, in which only
the rows of new members and tables with new pages are written again. It must not know the model or when steps run.
"""

from __future__ import annotations

import collections.abc as abc
from collections.abc import Callable

import numpy as np
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


class Download:
    """A copy of int64 numbers on its way to the host, which waits for it alone, not for what is launched behind it."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers
        self._copy = torch.empty(len(numbers), dtype=torch.int64, pin_memory=numbers.is_cuda)
        self._copy.copy_(numbers, non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if numbers.is_cuda:
            new_event: Callable[[], torch.cuda.Event] = torch.cuda.Event
            self._copied = new_event()
            self._copied.record()

    def read(self) -> list[int]:
        """Wait until the numbers are there, and return them."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[int] = self._copy.tolist()
        return numbers


class Rows:
    """`capacity` rows with a block table of `pages` each; an unused row has context length 0.

    token: the token to decode. context_lens: tokens, with that one. moves: 1, or 0 for unused rows and for rows that
    compute their token again and stay. key: of the seed. inverse_temperature: 0 for greedy. All are int64;
    inverse_temperature and top_p are float64. `members` are the sequences of the first rows, `row_of` has their numbers.
    """

    def __init__(self, capacity: int, pages: int, device: torch.device) -> None:
        self.capacity, self.pages, self.device = capacity, pages, device
        self.buffer = torch.zeros(capacity * (INTEGERS + FLOATS + pages), dtype=torch.int64, device=device)
        cut = INTEGERS * capacity, FLOATS * capacity
        integers, floats, tables = torch.split(self.buffer, [*cut, capacity * pages])
        self.token, self.context_lens, self.moves, self.key, self.top_k = integers.view(-1, capacity)
        self.inverse_temperature, self.top_p = floats.view(torch.float64).view(-1, capacity)
        self.block_tables = tables.view(capacity, pages)
        self.members: list[Sequence] = []
        self.row_of: dict[Sequence, int] = {}
        self._image = np.zeros(len(self.buffer), np.int64)  # the same on the host, in the same order
        fields, tables_here = np.split(self._image, [(INTEGERS + FLOATS) * capacity])
        self._fields = fields.reshape(-1, capacity)
        # Each step changes the token, the context length and the move; the other fields stay as long as the sequence.
        self._steps, self._params = self._fields[:3], self._fields[3:INTEGERS]
        self._factors = self._fields[INTEGERS:].view(np.float64)
        self._tables = tables_here.reshape(capacity, pages)
        self._pages: list[list[int]] = [[]] * capacity  # of each row, as its table has them

    @property
    def positions(self) -> list[int]:
        """The positions of the tokens to decode, row by row."""
        positions: list[int] = (self._steps[1, : len(self.members)] - 1).tolist()
        return positions

    def write(self, sequences: abc.Sequence[Sequence], held: abc.Sequence[Sequence] = ()) -> None:
        """Put these into the first rows, each to decode its last token; `held` ones compute theirs again."""
        tokens = [seq.output_ids[-1] for seq in sequences]
        tokens += [seq.tokens(seq.computed - 1, 1)[0] for seq in held]
        self._put(sequences, held, tokens, [seq.computed + 1 for seq in sequences])

    def follow(
        self, sequences: abc.Sequence[Sequence], held: abc.Sequence[Sequence], joining: abc.Mapping[Sequence, int],
        drawn: Download | None,
    ) -> None:  # fmt: skip
        """Put these in for the step after the last one, each to decode a token that only the device knows as yet.

        Those of `sequences` and `held` are in the rows of the last step, those of `joining` at these places of `drawn`.
        """
        before = self.row_of
        known = self.token.clone() if drawn is None else torch.cat([self.token, drawn.numbers.clamp(min=0)])
        places = [before[seq] for seq in sequences]
        places += [self.capacity + place for place in joining.values()]
        places += [before[seq] for seq in held]
        context_lens = [seq.computed + 2 for seq in sequences] + [seq.length + 1 for seq in joining]
        self._put([*sequences, *joining], held, places, context_lens)
        token = self.token[: len(self.members)]
        token.copy_(known[token])

    def advance(self) -> None:
        """Note that the next step has the same members and pages as the last one."""
        self._steps[1] += self._steps[2]

    def _put(
        self,
        sequences: abc.Sequence[Sequence],
        held: abc.Sequence[Sequence],
        tokens: list[int],
        context_lens: list[int],
    ) -> None:
        """Write all rows; the `tokens`, or where they are, are those of `sequences` and `held`."""
        rows, live = self._seat([*sequences, *held]), len(sequences)
        token, context_lens_here, moves = self._steps
        token[rows], context_lens_here[rows] = tokens, context_lens + [seq.computed for seq in held]
        moves[: len(rows)] = 1
        moves[rows[live:]] = 0
        self.buffer.copy_(upload(torch.from_numpy(self._image), self.device))

    def _seat(self, members: list[Sequence]) -> list[int]:
        """Return a row for each, its own if it has one that is not too high; write what is new in these rows."""
        count, before = len(members), len(self.members)
        row_of, self.row_of = self.row_of, {}  # empty until all is written: whoever comes after an error gets a new row
        rows = [row_of.get(seq, count) for seq in members]
        new = [i for i, row in enumerate(rows) if row >= count]
        seated = self.members[:count] + members[before:]  # the right length; all that is wrong in it is new
        for i, row in zip(new, sorted({*range(count)}.difference(rows)) if new else ()):
            rows[i], seated[row], p = row, members[i], members[i].sampling
            self._params[:, row] = key_of(p.seed), p.top_k
            self._factors[:, row] = p.inverse_temperature, p.top_p
        for row, seq in zip(rows, members):
            if self._pages[row] != seq.pages:
                self._set_table(row, seq.pages)
        self._fields[:, count:before] = 0
        for row in range(count, before):
            self._set_table(row, [])
        self.members, self.row_of = seated, dict(zip(members, rows))
        return rows

    def _set_table(self, row: int, pages: list[int]) -> None:
        self._tables[row, : len(pages)] = pages
        self._tables[row, len(pages) :] = 0
        self._pages[row] = pages[:]  # a copy, as the scheduler changes its list in place
