"""The text of one answer: bytes to characters, cut at the first stop string, whole or as it grows.

The loop feeds it token by token only for requests that can stop early; all others are decoded once, at the end, in the
handler's thread. It must not know HTTP or batching.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from models.text.tokenizer import Detokenizer, Tokenizer
from models.text.tool_format import CLOSE, OPEN, Thinking


class AnswerText:
    """Follows the generated tokens of one request.

    The answer ends where the first of `stop_texts` begins, and at the first of `stop_ids` or `eos_ids`; with `keep_stop`
    the stop stays in the text. A stop does not count if it ends among the first `min_tokens` tokens, nor a stop text in
    the `thinking` part. Ids of `eos_ids` always count: sampling lets one pass that early only where a form is complete.
    `hidden` ids never give text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_texts: Sequence[str] = (),
        stop_ids: Collection[int] = (),
        *,
        eos_ids: Collection[int] = (),
        keep_stop: bool = False,
        min_tokens: int = 0,
        hidden: Collection[int] = (),
        thinking: Thinking = "none",
    ) -> None:
        self.stop_texts = tuple(stop_texts)
        self.stop_ids = frozenset(stop_ids)
        self.eos_ids = frozenset(eos_ids)
        self.keep_stop = keep_stop
        self.min_tokens = min_tokens
        self.hidden = frozenset(hidden)
        self.thinking = thinking
        self.stop_reason: str | int | None = None
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer) if self.stop_texts else None
        self._text = ""
        self._begin = 0 if thinking == "none" else -1  # of the text behind the thinking part, once that has ended
        self._fed = 0
        self._ends_at = 0  # tokens at which the stop was found

    @property
    def rules(self) -> tuple[object, ...]:
        """What decides, beside the tokens, about the text and its end."""
        return self.stop_texts, self.stop_ids, self.eos_ids, self.keep_stop, self.min_tokens, self.hidden, self.thinking

    @property
    def watches(self) -> bool:
        """Whether each token must be fed as it comes, to find the end."""
        return bool(self.stop_texts or self.stop_ids or self.eos_ids)

    def feed(self, token: int) -> str | None:
        """Add a token; return "stop" if the answer ends with it."""
        self._fed += 1
        counts = self._fed > self.min_tokens
        if token in self.eos_ids:
            return self._end(None)
        if counts and token in self.stop_ids:
            return self._end(token)
        if self._detokenizer is None or token in self.hidden:
            return None
        before = len(self._text)
        self._text += self._detokenizer.feed([token])
        if self._begin < 0:
            self._begin = before = self._end_of_thinking(before)
        if not counts or self._begin < 0:
            return None
        # Each from its own length back: a stop that ended before this token did not count, or is not one.
        hits = [(self._text.find(stop, max(self._begin, before - len(stop) + 1)), stop) for stop in self.stop_texts]
        hits = [(position, stop) for position, stop in hits if position >= 0]
        if not hits:
            return None
        position, stop = min(hits, key=lambda hit: hit[0])
        self._text = self._text[: position + (len(stop) if self.keep_stop else 0)]
        return self._end(stop)

    def _end_of_thinking(self, before: int) -> int:
        """Return where the thinking part ends, 0 without one, -1 while it is open, as it was at `before` characters."""
        if self.thinking == "maybe" and not OPEN.startswith(self._text.lstrip()[: len(OPEN)]):
            return 0
        end = self._text.find(CLOSE, max(0, before - len(CLOSE) + 1))
        return end + len(CLOSE) if end >= 0 else -1

    def _end(self, reason: str | int | None) -> str:
        self.stop_reason = reason
        self._ends_at = self._fed
        return "stop"

    def text(self, output_ids: list[int]) -> str:
        """Return the answer's whole text, given all its token ids."""
        if self._ends_at and len(output_ids) >= self._ends_at:
            if isinstance(self.stop_reason, str):
                return self._text
            if not self.keep_stop:
                output_ids = output_ids[:-1]
        if self.hidden:
            output_ids = [token for token in output_ids if token not in self.hidden]
        return self._tokenizer.decode(output_ids)

    def growing(self, follows_tokens: bool = False) -> GrowingText:
        """Return the part of this answer that a reader may see while it grows."""
        stops = () if self.keep_stop else self.stop_texts
        return GrowingText(self._tokenizer, stops, self.hidden, follows_tokens)


class GrowingText:
    """The part of an answer that is certain: whole characters, and nothing that may be the beginning of a stop.

    The results of `feed`, and of `rest` at the end, join to the answer's whole text. With `follows_tokens`,
    `shown_tokens` counts the tokens whose text has been returned in full.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], hidden: Collection[int], follows_tokens: bool
    ) -> None:
        self.shown_tokens = 0
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = stops
        self._hidden = hidden
        self._follows = follows_tokens
        self._held = ""
        self._shown = 0  # characters
        self._ends: deque[int] = deque()  # of the tokens not shown yet, in characters

    def feed(self, tokens: list[int]) -> str:
        """Add tokens, none of which ends the answer; return the text that became certain."""
        if self._hidden:
            tokens = [t for t in tokens if t not in self._hidden] if not self._follows else tokens
        if self._follows:
            self._feed_singly(tokens)
        else:
            self._held += self._detokenizer.feed(tokens)
        cut = len(self._held) - self._doubtful()
        new, self._held = self._held[:cut], self._held[cut:]
        self._shown += len(new)
        while self._ends and self._ends[0] <= self._shown:
            self._ends.popleft()
            self.shown_tokens += 1
        return new

    def _feed_singly(self, tokens: list[int]) -> None:
        for token in tokens:
            if token not in self._hidden:
                self._held += self._detokenizer.feed([token])
            # A token that leaves a character open is shown with the one that completes it.
            half = self._detokenizer.is_halfway
            self._ends.append(self._shown + len(self._held) + half)

    def _doubtful(self) -> int:
        """Return the length of the longest tail that may be the beginning of a stop."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def rest(self, whole: str) -> str:
        """Return the part of the answer's `whole` text that has not been shown."""
        return whole[self._shown :]
