"""Propose what followed the last tokens before: prompt lookup (Saxena 2023), for any model.

Each sequence has an index of its prompt and answer by pairs of tokens, which grows with the answer: a token costs one
entry, and no text is ever searched. Behind its own text a sequence looks into the recent answers of the same client.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from scheduling.latest import Latest
from scheduling.sequence import Sequence
from scheduling.speculation import MOST, Offer

CANDIDATES = 4  # the latest places of a pair that are looked at
LONGEST = 8  # tokens that agree before a place; more say nothing new
MAX_TOKENS = 1 << 15  # of a sequence that are indexed
ANSWERS = 8  # of a client that are kept
ANSWER_TOKENS = 2048  # of each of them
CLIENTS = 256


class Index:
    """The places of each pair of tokens in a growing text."""

    __slots__ = ("before", "ends", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        # The number of tokens up to the latest place of a pair, its own included.
        self.ends: dict[tuple[int, int], int] = {}
        self.before = [0, 0]  # by such a number: that of the place before, 0 for none

    def extend(self, tokens: list[int]) -> int:
        """Add tokens; return the place before of the pair at the end, 0 if it is new."""
        ends, before, place = self.ends, self.before, 0
        text = self.tokens[-1:] + tokens
        for end, pair in enumerate(pairwise(text), max(1, len(self.tokens)) + 1):
            place = ends.get(pair, 0)
            ends[pair] = end
            before.append(place)
        self.tokens += tokens
        return place

    def best(self, place: int, text: list[int]) -> tuple[int, int]:
        """Return the place, of `place` and some before it, where most tokens agree with the end of `text`, and how many."""
        tokens, most, found = self.tokens, 0, 0
        for _ in range(CANDIDATES):
            if not place:
                break
            agreed = 2
            while (
                agreed < LONGEST
                and agreed < place
                and agreed < len(text)
                and tokens[place - 1 - agreed] == text[-1 - agreed]
            ):
                agreed += 1
            if agreed > most:
                most, found = agreed, place
                if agreed >= LONGEST:
                    break
            place = self.before[place]
        return found, most


class NgramDrafter:
    """Drafts from the text of each sequence and from what its client was answered before."""

    spent = 0.0

    def __init__(self) -> None:
        self._own: dict[Sequence, Index] = {}
        self._answers = Latest[str, deque[Index]](CLIENTS)
        self._found: dict[Sequence, tuple[Index, int]] = {}  # where the drafts of this step are

    def survey(self, sequences: list[Sequence]) -> list[Offer]:
        """See `Drafter.survey`."""
        offers, found, own, answers = [], self._found, self._own, self._answers
        found.clear()
        for i, seq in enumerate(sequences):
            ids = seq.output_ids
            if not ids:
                continue
            index = own.get(seq)
            if index is None:
                index = own[seq] = Index()
                index.extend(seq.prompt_ids[-MAX_TOKENS:])
            known = len(index.tokens) - min(len(seq.prompt_ids), MAX_TOKENS)
            place = index.extend(ids[known:])
            text, most = index, MOST
            if not place and seq.client in answers:
                text, place = self._in_answers(seq, index.tokens)
                most = min(MOST, len(text.tokens) - place)
            if place:
                place, agreed = text.best(place, index.tokens)
                found[seq] = text, place
                offers.append(Offer(i, most, agreed))
        return offers

    def _in_answers(self, seq: Sequence, tokens: list[int]) -> tuple[Index, int]:
        pair = tokens[-2], tokens[-1]
        for answer in reversed(self._answers[seq.client]):
            place = answer.ends.get(pair, 0)
            if 0 < place < len(answer.tokens):
                return answer, place
        return self._own[seq], 0

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        """See `Drafter.propose`."""
        drafts = []
        for seq, count in zip(sequences, counts):
            index, place = self._found[seq]
            own = index.tokens[place : place + count]
            period = len(index.tokens) - place
            while len(own) < count:  # a text that repeats itself goes on to do so
                own.append(own[-period])
            drafts.append(own)
        return drafts

    def seconds(self, sequences: int) -> float:
        """See `Drafter.seconds`; a lookup takes microseconds."""
        return 0.0

    def forget(self, seq: Sequence) -> None:
        """See `Drafter.forget`; the answer of a finished sequence stays for the next one of its client."""
        self._own.pop(seq, None)
        if not seq.client or seq.finish_reason not in ("stop", "length"):
            return
        index = Index()
        index.extend(seq.output_ids[-ANSWER_TOKENS:])
        answers = self._answers[seq.client] = self._answers.get(seq.client) or deque(maxlen=ANSWERS)
        answers.append(index)
