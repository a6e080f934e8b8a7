"""Decode steps on the device, one ahead of the host.

A step reads the state of all rows on the device and advances it, so token, context length and page of the next step are
there before the host has seen the token. So `decode` launches the next step for the same members first, and waits for
its own afterwards; the device never waits for Python.

A step that was launched ahead may be used, or forgotten, for these reasons:
* It is used only by sequences whose position, last token and pages are those that it decoded (`Flight.serves`), so its
  tokens, keys and values are theirs. Its other rows do not matter, even if their sequences have left.
* A step that no sequence can use is forgotten. It wrote the keys and values of right tokens at their positions, where
  the next step writes the same ones again, or behind the end of a context, which nothing reads.
* It may still write to pages that a member has released. Their next owner's steps come later on the same stream, and
  write each position before they read it.

The loop around it stays synchronous and knows nothing of it. It must not know prompts, policies or how a row's logits
are computed.
"""

from __future__ import annotations

import collections.abc as abc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from generate.gpu import card, sampling
from generate.gpu.graphs import GraphReplayer, Replayer, buckets_up_to, recorded
from generate.gpu.rows import Rows
from scheduling.sequence import Sequence

BUFFERS = 3  # for tokens on the host: one is read, one in flight, one spare
RowLogits = Callable[[Rows, int], Tensor]  # the logits of the first n rows, whose keys and values are appended


@dataclass(slots=True)
class Flight:
    """A step that was launched: the row of each sequence, and the position and pages of each row.

    The scheduler gives a sequence another list when it gives it other pages, so the identity of the list suffices; it
    appends to the list when a sequence grows. `page_counts` are the pages that the rows' tables had at the launch.
    """

    row_of: dict[Sequence, int]
    held: list[Sequence]
    positions: list[int]
    pages: list[list[int]]
    page_counts: list[int]
    size: int
    drawing: sampling.Drawing
    tokens: Tensor
    logits: Tensor
    copied: torch.cuda.Event | None  # the tokens are on the host
    inputs: list[int] | None = None  # the tokens that it decodes, once the host has them

    def serves(self, sequences: abc.Sequence[Sequence], held: abc.Sequence[Sequence], page_size: int) -> bool:
        """Return whether it decodes the last token of each of `sequences`, whatever its other rows do."""
        if self.inputs is None or self.held != list(held):
            return False
        for seq in sequences:
            row = self.row_of.get(seq)
            if row is None or self.positions[row] != seq.computed or self.inputs[row] != seq.output_ids[-1]:
                return False
            if self.pages[row] is not seq.pages or self.page_counts[row] * page_size <= seq.computed:
                return False
        return True

    def read(self) -> list[int]:
        """Wait until the step is done; return the token of each row."""
        if self.copied is not None:
            self.copied.synchronize()
        tokens: list[int] = self.tokens.tolist()
        return tokens


class Decoder:
    """Decode up to `rows.capacity` sequences at once; the device must be able to draw for all their parameters.

    No step is launched ahead for a position behind `context`, which has neither weights nor pages.
    """

    def __init__(self, rows: Rows, row_logits: RowLogits, context: int, page_size: int) -> None:
        self.rows = rows
        self.page_size = page_size
        self.context = context
        self.row_logits = row_logits
        on_gpu = rows.device.type == "cuda"
        records = on_gpu and not card.is_plain()
        buckets = buckets_up_to(rows.capacity)
        self.replayer: Replayer = (GraphReplayer if records else Replayer)(self._step, buckets, sampling.DRAWINGS)
        self.drawn = torch.zeros(rows.capacity, dtype=torch.int64, device=rows.device)
        # A buffer is used again BUFFERS launches later. Its tokens were read long before: at most two steps are in flight.
        self._buffers = torch.zeros(BUFFERS, rows.capacity, dtype=torch.int64, pin_memory=on_gpu)
        self._events: list[torch.cuda.Event | None] = [None] * BUFFERS
        if on_gpu:
            new_event: Callable[[], torch.cuda.Event] = torch.cuda.Event
            self._events = [new_event() for _ in range(BUFFERS)]
        self._launches = 0
        self.ahead: Flight | None = None
        self.used_ahead = 0  # steps that were launched ahead and then used

    def warm_up(self) -> None:
        """Record every step, on unused rows."""
        self.forget()
        self.rows.write([])
        self.replayer = recorded(self.replayer, "decode steps")

    def forget(self) -> None:
        """Use the step in flight for no sequence."""
        self.ahead = None

    def decode(
        self, sequences: abc.Sequence[Sequence], held: abc.Sequence[Sequence] = (), go_ahead: bool = False
    ) -> list[int]:
        """Return the next token of each sequence, or sampling.NOT_FINITE or TOO_FLAT.

        With `go_ahead`, also launch the step after this one for the same sequences, which are likely to go on.
        """
        flight, self.ahead = self.ahead, None
        if flight is not None and flight.serves(sequences, held, self.page_size):
            self.used_ahead += 1
        else:
            flight = self._launch_for(sequences, held)
        rows = [flight.row_of[seq] for seq in sequences]
        following = self._launch_after(flight, sequences) if go_ahead else None
        tokens = flight.read()
        if following is not None and min(tokens[row] for row in rows) >= 0:
            following.inputs = tokens
            self.ahead = following
        return [tokens[row] for row in rows]

    def logits(self, sequences: abc.Sequence[Sequence], held: abc.Sequence[Sequence] = ()) -> Tensor:
        """Return the logits [n, V] of a step whose own tokens are not used; valid until the next step."""
        return self.launch(sequences, held).logits[: len(sequences)]

    def launch(self, sequences: abc.Sequence[Sequence], held: abc.Sequence[Sequence] = ()) -> Flight:
        """Launch a step, row i of which decodes sequence i; no step is launched ahead of the next."""
        self.forget()
        return self._launch_for(sequences, held)

    def _launch_for(self, sequences: abc.Sequence[Sequence], held: abc.Sequence[Sequence]) -> Flight:
        """Put these into the rows and launch their step."""
        self.rows.write(sequences, held)
        members = [*sequences, *held]
        size = self.replayer.bucket(len(members))
        positions = [seq.computed for seq in members]
        drawing = sampling.drawing_for([seq.sampling for seq in sequences])
        row_of = {seq: row for row, seq in enumerate(sequences)}
        return self._launch(row_of, list(held), positions, [seq.pages for seq in members], size, drawing)

    def _launch_after(self, flight: Flight, sequences: abc.Sequence[Sequence]) -> Flight | None:
        """Launch the step after `flight` for `sequences`; None if a smaller bucket suffices or a context is full."""
        count = len(sequences) + len(flight.held)
        if self.replayer.bucket(count) < flight.size:
            return None
        if any(flight.positions[flight.row_of[seq]] + 1 >= self.context for seq in sequences):
            return None
        row_of = flight.row_of
        if len(sequences) < len(row_of):
            row_of = {seq: row_of[seq] for seq in sequences}
            held = range(len(flight.positions) - len(flight.held), len(flight.positions))
            self.rows.keep([*row_of.values(), *held])
        self._extend(flight, row_of)
        positions = [position + 1 for position in flight.positions]
        return self._launch(row_of, flight.held, positions, flight.pages, flight.size, flight.drawing)

    def _extend(self, flight: Flight, row_of: dict[Sequence, int]) -> None:
        """Put the pages that sequences got since `flight` was launched into the tables of their rows.

        The scheduler gives pages a step ahead, so that the next position has one. Where it has none, the request ends.
        """
        grown = [(seq, row) for seq, row in row_of.items() if len(seq.pages) > flight.page_counts[row]]
        if grown:
            sequences, rows = zip(*grown)
            self.rows.extend(rows, sequences, [flight.page_counts[row] for row in rows])

    def _launch(
        self, row_of: dict[Sequence, int], held: list[Sequence], positions: list[int], pages: list[list[int]],
        size: int, drawing: sampling.Drawing,
    ) -> Flight:  # fmt: skip
        slot = self._launches % BUFFERS
        self._launches += 1
        logits = self.replayer.run(size, drawing)
        tokens, copied = self._buffers[slot, :size], self._events[slot]
        tokens.copy_(self.drawn[:size], non_blocking=True)
        if copied is not None:
            copied.record()
        counts = [len(own) for own in pages]
        return Flight(row_of, held, positions, pages, counts, size, drawing, tokens, logits, copied)

    def _step(self, size: int, drawing: sampling.Drawing) -> Tensor:
        """Decode one token of the first `size` rows and advance them; return the logits [size, V]."""
        rows = self.rows
        logits = self.row_logits(rows, size)
        context_lens, moves = rows.context_lens[:size], rows.moves[:size]
        where = None if drawing == "greedy" else sampling.uniforms(rows.key[:size], context_lens)
        inverse, top_k, top_p = rows.inverse_temperature[:size], rows.top_k[:size], rows.top_p[:size]
        drawn = sampling.draw(logits, where, inverse, top_k, top_p, drawing)
        self.drawn[:size].copy_(drawn)
        # NOT_FINITE and TOO_FLAT end the row on the host; until then its token must be one that can be embedded.
        rows.token[:size].copy_(torch.where(moves > 0, drawn.clamp(min=0), rows.token[:size]))
        context_lens.add_(moves)
        return logits
