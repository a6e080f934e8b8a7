"""Decode steps on the device, one ahead of the host.

A step reads the state of all rows on the device and advances it, so token, context length and page of the next step are
there before the host has seen the token. So `decode` launches the next step first, also for prompts that are complete and
whose first tokens are drawn on the device, and waits for its own afterwards; the device never waits for Python.

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
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from generate.gpu import card, sampling
from generate.gpu.graphs import GraphReplayer, Replayer, buckets_up_to, recorded
from generate.gpu.rows import Download, Rows, upload
from generate.gpu.sampling import FastDraw
from scheduling.sequence import Sequence

RowLogits = Callable[[Rows, int], Tensor]  # the logits of the first n rows, whose keys and values are appended


class Following(NamedTuple):
    """The sequences that are likely to decode in the next step: some of those that decode now, and new ones.

    `joining` has the place of the first token of each new one in `drawn`, which is on the device.
    """

    staying: abc.Sequence[Sequence] = ()
    joining: abc.Mapping[Sequence, int] = MappingProxyType({})
    drawn: Download | None = None


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
    drawing: sampling.Drawing
    logits: Tensor
    tokens: Download
    inputs: dict[Sequence, int] = field(default_factory=dict)  # the tokens that it decodes, once the host has them

    def serves(self, sequences: abc.Sequence[Sequence], held: abc.Sequence[Sequence], page_size: int) -> bool:
        """Return whether it decodes the last token of each of `sequences`, whatever its other rows do."""
        if self.held != list(held):
            return False
        for seq in sequences:
            if self.inputs.get(seq) != seq.output_ids[-1]:
                return False
            row = self.row_of[seq]
            if self.positions[row] != seq.computed or self.pages[row] is not seq.pages:
                return False
            if self.page_counts[row] * page_size <= seq.computed:
                return False
        return True

    def is_followed_by(self, staying: abc.Sequence[Sequence]) -> bool:
        """Return whether its rows do for the next step of these members: all of them, none of which got pages since."""
        return len(staying) + len(self.held) == len(self.row_of) and self.page_counts == [*map(len, self.pages)]

    def read(self, sequences: abc.Sequence[Sequence]) -> list[int]:
        """Wait until the step is done; return the token of each sequence."""
        tokens = self.tokens.read()
        return [tokens[self.row_of[seq]] for seq in sequences]


class Decoder:
    """Decode up to `rows.capacity` sequences at once; the device must be able to draw for all their parameters."""

    def __init__(self, rows: Rows, row_logits: RowLogits, page_size: int, fast_draw: FastDraw | None = None) -> None:
        self.rows = rows
        self.page_size = page_size
        self.row_logits, self.fast_draw = row_logits, fast_draw
        records = rows.device.type == "cuda" and not card.is_plain()
        buckets = buckets_up_to(rows.capacity)
        self.replayer: Replayer = (GraphReplayer if records else Replayer)(self._step, buckets, sampling.DRAWINGS)
        self.drawn = torch.zeros(rows.capacity, dtype=torch.int64, device=rows.device)
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
        self, sequences: abc.Sequence[Sequence], held: abc.Sequence[Sequence], following: Following
    ) -> list[int]:
        """Return the next token of each sequence, or sampling.NOT_FINITE or TOO_FLAT.

        Also launch the step after this one, if it is known who is `following`. There may be no sequence that decodes now.
        """
        flight, self.ahead = self.ahead, None
        if flight is not None and sequences and flight.serves(sequences, held, self.page_size):
            self.used_ahead += 1
        else:
            flight = self._launch_for(sequences, held) if sequences or held else None
        after = self._launch_after(flight, following)
        tokens = flight.read(sequences) if flight is not None else []
        if after is not None:
            after.inputs = dict(zip(sequences, tokens))
            if following.drawn is not None:
                first = following.drawn.read()
                after.inputs |= {seq: first[place] for seq, place in following.joining.items()}
            self.ahead = after
        return tokens

    def launch(self, sequences: abc.Sequence[Sequence], held: abc.Sequence[Sequence] = ()) -> tuple[Flight, Tensor]:
        """Launch a step, ahead of which no other is launched; return it and the logits [n, V] of the sequences."""
        self.forget()
        flight = self._launch_for(sequences, held)
        rows = upload(torch.tensor([flight.row_of[seq] for seq in sequences], dtype=torch.int64), self.rows.device)
        return flight, flight.logits.index_select(0, rows)

    def _launch_for(self, sequences: abc.Sequence[Sequence], held: abc.Sequence[Sequence]) -> Flight:
        """Put these into the rows and launch their step."""
        self.rows.write(sequences, held)
        return self._launch(list(held), sampling.drawing_for([seq.sampling for seq in sequences]))

    def _launch_after(self, flight: Flight | None, following: Following) -> Flight | None:
        """Launch the step after `flight`; return None if no sequence follows, or if more do than there are rows."""
        staying, joining, drawn = following
        held = flight.held if flight is not None else []
        if not 0 < len(staying) + len(joining) <= self.rows.capacity - len(held):
            return None
        if flight is not None and not joining and flight.is_followed_by(staying):
            self.rows.advance()
            return self._launch(held, flight.drawing)
        # The scheduler gives pages a step ahead, so that the next position has one. Where it has none, the request ends.
        self.rows.follow(staying, held, joining, drawn)
        return self._launch(held, sampling.drawing_for([seq.sampling for seq in (*staying, *joining)]))

    def _launch(self, held: list[Sequence], drawing: sampling.Drawing) -> Flight:
        """Launch the step of those in the rows."""
        rows = self.rows
        size = self.replayer.bucket(len(rows.members))
        logits = self.replayer.run(size, drawing)
        pages = [seq.pages for seq in rows.members]
        counts, tokens = [*map(len, pages)], Download(self.drawn[:size])
        return Flight(rows.row_of, held, rows.positions, pages, counts, drawing, logits, tokens)

    def _step(self, size: int, drawing: sampling.Drawing) -> Tensor:
        """Decode one token of the first `size` rows and advance them; return the logits [size, V]."""
        rows = self.rows
        logits = self.row_logits(rows, size)
        context_lens, moves = rows.context_lens[:size], rows.moves[:size]
        inverse, top_k, top_p = rows.inverse_temperature[:size], rows.top_k[:size], rows.top_p[:size]
        drawn = sampling.draw(logits, rows.key[:size], context_lens, inverse, top_k, top_p, drawing, self.fast_draw)
        self.drawn[:size].copy_(drawn)
        # NOT_FINITE and TOO_FLAT end the row on the host; until then its token must be one that can be embedded.
        rows.token[:size].copy_(torch.where(moves > 0, drawn.clamp(min=0), rows.token[:size]))
        context_lens.add_(moves)
        return logits
