"""How far an answer is in its form, and the masks of the tokens that may follow.

What may follow is a function of the form and of the answer's token ids alone: a `Constraint` remembers how far it has read,
and goes back where the ids differ. So an answer that is preempted, retried or has drafts needs nothing of its own. It must
not know how a form is compiled, nor queues, policies or tensors.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

import llguidance
import numpy as np
from numpy.typing import NDArray

from generate.cores import cores
from generate.grammar import FormError, Grammar

MOST_SECONDS = 0.05  # of a processor, to read a token


class Constraint:
    """A form, and how far one answer is in it; equal to others of the same form."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.matcher = grammar.start()
        self._ids: list[int] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constraint) and other.grammar.key == self.grammar.key

    def __hash__(self) -> int:
        return hash(self.grammar.key)

    def at(self, ids: Sequence[int]) -> llguidance.LLMatcher:
        """Return the matcher after these tokens. Raises FormError if they are not of this form, or it became too complex."""
        known, same = self._ids, min(len(self._ids), len(ids))
        if known[:same] != ids[:same]:
            same = next(i for i in range(same) if known[i] != ids[i])
        if same < len(known) and (self.matcher.is_error() or not self.matcher.rollback(len(known) - same)):
            self.matcher, same = self.grammar.start(), 0
        rest, began = list(ids[same:]), time.thread_time()
        read = self.matcher.try_consume_tokens(rest) if rest else 0
        seconds = time.thread_time() - began
        known[same:] = rest[:read]
        if read < len(rest) or self.matcher.is_error():
            raise self.error()
        # The limits of llguidance do not bound what it takes to read a token of an ambiguous grammar.
        if seconds > MOST_SECONDS * max(1, len(rest)):
            raise FormError(f"its form takes {seconds:.2f} s for {len(rest):,} tokens, as it is too ambiguous")
        return self.matcher

    def error(self) -> FormError:
        """Return why nothing may follow."""
        reason = self.matcher.get_error().partition("\n")[0] or "no token can follow"
        return FormError(f"its form cannot go on after {len(self._ids):,} tokens: {reason[:200]}")

    def forced(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens that most likely follow these, since the form leaves no other text."""
        try:
            matcher = self.at(ids)
        except FormError:  # which the step will find, too
            return []
        return [] if matcher.is_stopped() else matcher.compute_ff_tokens()


class Masks(NamedTuple):
    """Which tokens may follow: a bit for each token of the vocabulary, (rows, words); and the rows where none can be found."""

    bits: NDArray[np.int32]
    errors: dict[int, FormError]

    def allowed(self, row: int, vocabulary: int) -> NDArray[np.bool_]:
        """Return one row, unpacked: bool (vocabulary)."""
        return np.unpackbits(self.bits[row].view(np.uint8), bitorder="little")[:vocabulary].astype(np.bool_)


class Stopwatch:
    """Adds up the seconds that the engine's thread waits for masks."""

    seconds = 0.0

    def take(self) -> float:
        """Return the seconds so far, and start again at zero."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


filling = Stopwatch()


def fill(constraints: Sequence[Constraint], histories: Sequence[Sequence[int]]) -> Masks:
    """Return the masks after each of these answers, (ids), in parallel and without the interpreter.

    Answers of the same constraint follow each other, each with one draft token more. Behind a wrong draft all may follow:
    such a row does not count.
    """
    began = time.perf_counter()
    words = -(-constraints[0].grammar.grammars.vocabulary // 32)
    masks = Masks(np.full((len(constraints), words), -1, np.int32), {})
    jobs: dict[int, tuple[Constraint, list[int]]] = {}  # by the row of an answer: its drafts
    for row, (constraint, ids) in enumerate(zip(constraints, histories)):
        if not row or constraint is not constraints[row - 1]:
            first = row
            try:
                constraint.at(ids)
                jobs[row] = constraint, []
            except FormError as error:
                masks.errors[row] = error
        elif first in jobs:
            jobs[first][1].append(ids[-1])
    where = masks.bits.ctypes.data, words * 4, len(constraints)
    if plain := [(own.matcher, row) for row, (own, drafts) in jobs.items() if not drafts]:
        executor().unsafe_compute_mask_ptr(plain, *where)
    if drafted := [(own.matcher, row, drafts) for row, (own, drafts) in jobs.items() if drafts]:
        executor().unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
    for row, (constraint, _) in jobs.items():
        if constraint.matcher.is_error():
            masks.errors[row] = constraint.error()
    filling.seconds += time.perf_counter() - began
    return masks


@functools.cache
def executor() -> llguidance.LLExecutor:
    """Return the threads that fill masks."""
    return llguidance.LLExecutor(cores())
