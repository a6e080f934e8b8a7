"""Drafters for models without weights: their draft tokens are accepted as often as a parameter or a recording says.

They stand for a real drafter in the simulator and in front of a mock model. How many draft tokens a step has is decided
where the server decides it (`scheduling/speculation.py`). This module must not know what a step costs.
"""

from __future__ import annotations

import collections.abc as abc
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple
from zlib import crc32

from scheduling.sequence import UNKNOWN_TOKEN, Sequence
from scheduling.speculation import MOST, Offer, Speculator

WRONG_TOKEN = -1  # the id of no token
MASK = (1 << 64) - 1
Tokens = Callable[[Sequence, int], int]  # the token that a sequence gets after so many others


class KnownDrafter:
    """Proposes draft tokens of which it is known whether they are accepted; `tokens` are those of the model."""

    spent = 0.0

    def __init__(self, tokens: Tokens = lambda seq, later: UNKNOWN_TOKEN) -> None:
        self._tokens = tokens

    def survey(self, sequences: list[Sequence]) -> list[Offer]:
        """See `Drafter.survey`."""
        offers = []
        for i, seq in enumerate(sequences):
            if seq.output_ids and (most := self.most(seq)):
                offers.append(Offer(i, most))
        return offers

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        """See `Drafter.propose`."""
        return [
            [
                self._tokens(seq, later) if self.accepts(seq, len(seq.output_ids) + later) else WRONG_TOKEN
                for later in range(count)
            ]
            for seq, count in zip(sequences, counts)
        ]

    def most(self, seq: Sequence) -> int:
        """Return how many draft tokens there are for a sequence."""
        raise NotImplementedError

    def accepts(self, seq: Sequence, place: int) -> bool:
        """Return whether the draft token for this place of the answer is accepted, if those before it are."""
        raise NotImplementedError

    def seconds(self, sequences: int) -> float:
        """See `Drafter.seconds`."""
        return 0.0

    def forget(self, seq: Sequence) -> None:
        """See `Drafter.forget`."""


class DrawnDrafter(KnownDrafter):
    """Each draft token is accepted with the same probability, drawn by seed, request id and place alone."""

    def __init__(self, acceptance: float, seed: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self._below = acceptance * (MASK + 1)
        self._seed = seed
        self._keys: dict[Sequence, int] = {}

    def most(self, seq: Sequence) -> int:
        return MOST

    def accepts(self, seq: Sequence, place: int) -> bool:
        key = self._keys.get(seq)
        if key is None:
            key = self._keys[seq] = mixed(crc32(seq.id.encode()) + (self._seed << 32))
        return mixed(key + place) < self._below

    def forget(self, seq: Sequence) -> None:
        self._keys.pop(seq, None)


class Recorded(NamedTuple):
    """The draft tokens of one answer: which of its places had one that was accepted, or not, and how many began where."""

    accepted: dict[int, bool]
    drafted: dict[int, int]

    @classmethod
    def of(cls, steps: Iterable[Iterable[int]]) -> Recorded:
        """Return the record of an answer from its steps with draft tokens: the place, their number, those accepted.

        The token behind draft tokens that were all accepted would have been the next of them, and counts as accepted.
        """
        made = cls({}, {})
        for place, drafted, right in steps:
            made.drafted[place] = drafted
            made.accepted.update({place + i: i < right or right == drafted for i in range(right + 1)})
        return made


class RecordedDrafter(KnownDrafter):
    """Has the draft tokens that were recorded, by request id.

    In a step that begins where none began, as with another number of drafts, each place keeps what was recorded of it.
    """

    def __init__(self, answers: Mapping[str, Recorded], **options: Any) -> None:
        super().__init__(**options)
        self._by_id = answers

    def most(self, seq: Sequence) -> int:
        own, place = self._by_id.get(seq.id), len(seq.output_ids)
        if own is None:
            return 0
        return own.drafted.get(place, MOST if place in own.accepted else 0)

    def accepts(self, seq: Sequence, place: int) -> bool:
        own = self._by_id.get(seq.id)
        return own is not None and own.accepted.get(place, False)


def mixed(number: int) -> int:
    """Return 64 bits that look random (splitmix64's finalizer: Steele, Lea, Flood 2014)."""
    number = (number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


def recorded(records: Iterable[Mapping[str, Any]]) -> dict[str, Recorded]:
    """Return the draft tokens of each request, in order of appearance; records are those of `/events`."""
    answers: dict[str, list[tuple[int, int, int]]] = {}
    prompts: dict[str, int] = {}
    for record in records:
        drafts = {draft["id"]: (draft["drafted"], draft["accepted"]) for draft in record.get("drafts", ())}
        for member in record["members"]:
            id = member["id"]
            steps = answers.setdefault(id, [])
            if member["phase"] != "decode":
                continue
            drafted, right = drafts.get(id, (0, 0))
            before = member["computed"] - 1 - right  # the whole prompt, before the first decode
            place = 1 + before - prompts.setdefault(id, before)
            if drafted:
                steps.append((place, drafted, right))
    return {id: Recorded.of(steps) for id, steps in answers.items()}


def replaying(records: abc.Sequence[Mapping[str, Any]], drafts: int) -> Speculator | None:
    """Return a speculator with the draft tokens of a server's records, and no others; None if there are none."""
    if not any("drafts" in record for record in records):
        return None  # a simulation without a speculator skips equal steps
    return Speculator(RecordedDrafter(recorded(records)), drafts)


def speculator(acceptance: float, drafts: str, seed: int = 0) -> Speculator:
    """Return a speculator for the simulator; `drafts` is a number, or `auto`."""
    return Speculator(DrawnDrafter(acceptance, seed), None if drafts == "auto" else int(drafts))
