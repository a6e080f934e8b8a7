"""The text of one answer: bytes to characters, cut at the first stop string.

The loop feeds it token by token only for requests that have something to watch for; all others are decoded once, at
the end, in the handler's thread. It must not know HTTP or batching.
"""

from __future__ import annotations

from collections.abc import Sequence

from generate.tokenizer import Detokenizer, Tokenizer


class AnswerText:
    """Follows the generated tokens of one request.

    `stops` end the answer where the first of them begins; `stop_ids` end it and give no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.stops = tuple(stops)
        self.stop_ids = stop_ids
        self.stop_reason: str | int | None = None
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer) if self.stops else None
        self._longest = max(map(len, self.stops), default=0)
        self._text = ""

    @property
    def watches(self) -> bool:
        """Whether each token must be fed as it comes."""
        return bool(self.stops or self.stop_ids)

    def feed(self, token: int) -> str | None:
        """Take in a token; return "stop" when the answer ends with it."""
        if token in self.stop_ids:
            self.stop_reason = token
            return "stop"
        if self._detokenizer is None:
            return None
        piece = self._detokenizer.feed([token])
        start = max(0, len(self._text) - self._longest + 1)
        self._text += piece
        found = [(self._text.find(stop, start), stop) for stop in self.stops]
        found = [(place, stop) for place, stop in found if place >= 0]
        if not found:
            return None
        place, self.stop_reason = min(found, key=lambda hit: hit[0])
        self._text = self._text[:place]
        return "stop"

    def text(self, output_ids: list[int]) -> str:
        """Return the answer's whole text, given all its token ids."""
        if isinstance(self.stop_reason, str):
            return self._text
        if isinstance(self.stop_reason, int):
            output_ids = output_ids[:-1]
        return self._tokenizer.decode(output_ids)
