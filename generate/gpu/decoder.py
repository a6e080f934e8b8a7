"""Decode steps on the device, one ahead of the host.

The state of all rows lies on the device, and a step moves it by itself: token, length and page are there for the next
one before the host has seen the token. So `decode` launches the next step first, for the same members, and waits for
its own afterwards; the device never waits for Python. If the next call names other members, those of them who were in
the launched step still have their tokens from it, and a step that fits nobody is forgotten: it wrote keys and values
of tokens that are right, where the same ones are written again, or behind what anybody reads. Pages that a member
gave back may be written once more by the step in flight, but before any later step's use of them: one stream.

`ModelRunner.forward` and the loop around it stay synchronous and know nothing of it. It must not know prompts,
policies or how a row's logits are computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from generate.gpu import sampling
from generate.gpu.graphs import Replayer, make_replayer
from generate.gpu.rows import Rows
from scheduling.sequence import Sequence

log = logging.getLogger(__name__)

BUFFERS = 3  # in which tokens come back: one is read, one in flight, one to spare
RowLogits = Callable[[Rows, int], Tensor]  # of the first n rows, their keys and values appended


@dataclass(slots=True)
class Flight:
    """A step that was launched: `rows` says where who sits, `places` what each then had computed."""

    rows: dict[Sequence, int]
    held: list[Sequence]
    places: list[int]
    size: int
    drawing: sampling.Drawing
    tokens: Tensor
    logits: Tensor
    landed: torch.cuda.Event | None
    before: list[int] | None = None  # the tokens it decodes, when the host has them

    def serves(self, sequences: Many[Sequence], held: Many[Sequence]) -> bool:
        """Whether it computed just what these need, whoever else was in it."""
        if self.before is None or self.held != list(held):
            return False
        for seq in sequences:
            row = self.rows.get(seq)
            if row is None or self.places[row] != seq.computed or self.before[row] != seq.output_ids[-1]:
                return False
        return True

    def read(self) -> list[int]:
        """Wait until the step is done; return the token of each row."""
        if self.landed is not None:
            self.landed.synchronize()
        return self.tokens.tolist()


class Decoder:
    """Decodes up to `rows.capacity` sequences at once, all of whose parameters the device can draw for.

    No step is launched ahead for a place behind `context`: there are no weights and no pages for it.
    """

    def __init__(self, rows: Rows, row_logits: RowLogits, context: int) -> None:
        self.rows = rows
        self.context = context
        self.row_logits = row_logits
        self.replayer = make_replayer(self._step, rows.capacity, rows.device)
        on_gpu = rows.device.type == "cuda"
        self.drawn = torch.zeros(rows.capacity, dtype=torch.int64, device=rows.device)
        self._landing = torch.zeros(BUFFERS, rows.capacity, dtype=torch.int64, pin_memory=on_gpu)
        self._events = [torch.cuda.Event() if on_gpu else None for _ in range(BUFFERS)]
        self._launches = 0
        self.ahead: Flight | None = None
        self.used_ahead = 0  # steps that had been launched before they were asked for

    def warm_up(self) -> None:
        """Record every step, on rows that are nobody's."""
        self.forget()
        self.rows.write([])
        try:
            self.replayer.record()
        except RuntimeError as error:
            log.warning("decode steps run without CUDA graphs, which is slower: %s", error)
            self.replayer = Replayer(self._step, self.rows.capacity)

    def forget(self) -> None:
        """Let nobody have the step in flight."""
        self.ahead = None

    def decode(self, sequences: Many[Sequence], held: Many[Sequence] = (), go_ahead: bool = False) -> list[int]:
        """Return the next token of each sequence, or sampling.NOT_FINITE or TOO_FLAT.

        With `go_ahead` the step after this one is launched too, for who is likely to be there still.
        """
        flight, self.ahead = self.ahead, None
        if flight is not None and flight.serves(sequences, held):
            self.used_ahead += 1
        else:
            flight = self._launch_for(sequences, held)
        rows = [flight.rows[seq] for seq in sequences]
        following = self._launch_after(flight, sequences) if go_ahead else None
        tokens = flight.read()
        if following is not None and min(tokens[row] for row in rows) >= 0:
            following.before = tokens
            self.ahead = following
        return [tokens[row] for row in rows]

    def logits(self, sequences: Many[Sequence], held: Many[Sequence] = ()) -> Tensor:
        """Return the logits [n, V] of a step that nobody's token is taken from; good until the next step."""
        self.forget()
        return self._launch_for(sequences, held).logits[: len(sequences)]

    def _launch_for(self, sequences: Many[Sequence], held: Many[Sequence]) -> Flight:
        """Put these into the rows and launch their step."""
        self.rows.write(sequences, held)
        members = [*sequences, *held]
        size = self.replayer.bucket(len(members))
        places = [seq.computed for seq in members]
        drawing = sampling.drawing_for([seq.sampling for seq in sequences])
        where = {seq: row for row, seq in enumerate(sequences)}
        return self._launch(where, list(held), places, size, drawing)

    def _launch_after(self, flight: Flight, sequences: Many[Sequence]) -> Flight | None:
        """Launch the step after `flight` for `sequences`; None when a smaller one would do, or one has no place left."""
        count = len(sequences) + len(flight.held)
        if self.replayer.bucket(count) < flight.size:
            return None
        if any(flight.places[flight.rows[seq]] + 1 >= self.context for seq in sequences):
            return None
        where = flight.rows
        if len(sequences) < len(where):
            where = {seq: where[seq] for seq in sequences}
            held = range(len(flight.places) - len(flight.held), len(flight.places))
            self.rows.keep([*where.values(), *held])
        places = [place + 1 for place in flight.places]
        return self._launch(where, flight.held, places, flight.size, flight.drawing)

    def _launch(
        self, rows: dict[Sequence, int], held: list[Sequence], places: list[int], size: int, drawing: sampling.Drawing
    ) -> Flight:
        slot = self._launches % BUFFERS
        self._launches += 1
        logits = self.replayer.run(size, drawing)
        tokens, landed = self._landing[slot, :size], self._events[slot]
        tokens.copy_(self.drawn[:size], non_blocking=True)
        if landed is not None:
            landed.record()
        return Flight(rows, held, places, size, drawing, tokens, logits, landed)

    def _step(self, size: int, drawing: sampling.Drawing) -> Tensor:
        """Decode one token of the first `size` rows and move them on; return the logits."""
        rows = self.rows
        logits = self.row_logits(rows, size)
        length, moves = rows.length[:size], rows.moves[:size]
        where = None if drawing == "greedy" else sampling.uniforms(rows.key[:size], length)
        drawn = sampling.draw(logits, where, rows.heat[:size], rows.top_k[:size], rows.top_p[:size], drawing)
        self.drawn[:size].copy_(drawn)
        # What is no token ends the row on the host; until then it has to be one that can be looked up.
        rows.token[:size].copy_(torch.where(moves > 0, drawn.clamp(min=0), rows.token[:size]))
        length.add_(moves)
        return logits
