"""What each KV page holds, as a model would have left it, for the law that preemption changes no token.

A model reads the keys and values at the places that the scheduler names, whatever they hold. Here each place holds the
whole text up to its token, as a number, so that a wrong one is noticed. This module must not know laws or policies.
"""

from __future__ import annotations

import collections.abc as abc

from scheduling.sequence import Sequence


class Contents:
    """The texts in the pages of a pool, by page and place."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._pages: dict[int, list[int]] = {}
        self._texts: dict[Sequence, list[int]] = {}  # of each token of a sequence: a number of the text that it ends

    def compute(self, seq: Sequence, count: int, drafts: abc.Sequence[int] = ()) -> bool:
        """Write the next tokens of a sequence; return whether all that they attend to is its own text.

        The last of them may be drafts, which are in the pages but not in the text.
        """
        size, end = self._size, seq.computed + count
        texts = [*self._texts_of(seq, end - len(drafts))]
        for token in drafts:
            texts.append(hash((texts[-1], token)))
        if end > len(seq.pages) * size:
            return False
        for at in range(seq.computed, end):
            self._pages.setdefault(seq.pages[at // size], [0] * size)[at % size] = texts[at]
        parts = (texts[start : min(end, start + size)] for start in range(0, end, size))
        return all(self._pages.get(page, [])[: len(part)] == part for page, part in zip(seq.pages, parts))

    def _texts_of(self, seq: Sequence, end: int) -> list[int]:
        texts = self._texts.setdefault(seq, [])
        for token in seq.tokens(len(texts), end - len(texts)):
            texts.append(hash((texts[-1] if texts else len(texts), token)))
        return texts
