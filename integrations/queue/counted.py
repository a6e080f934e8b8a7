"""How many tokens of an answer have passed, counted from outside while its bytes go on unchanged. Pure.

An event of a stream that carries text is one token until the upstream's own count arrives, which wins: `usage` of
OpenAI's dialect, `eval_count` of Ollama's. It is believed only beside text, and up to one token for each byte that passed. If
earlier answers of a model had more tokens than events, those are estimated from the length of the text. An answer in one piece contains its count; without one, four characters are a token.
"""

from __future__ import annotations

import json
from typing import Any

from api.http.errors import ApiError
from api.schemas.body import check_structure

LARGEST = 4 << 20  # bytes of an answer in one piece, or of one event, that are read; larger ones only pass
STREAMS = ("text/event-stream", "application/x-ndjson", "application/jsonl")
TEXTS = ("content", "text", "reasoning_content", "reasoning", "thinking", "refusal", "response", "arguments", "delta")
# Texts and calls of functions whose length says nothing, or is counted elsewhere; a count beside them may be believed.
OTHERS = ("completion", "generated_text", "partial_json", "name")
REASONS = ("finish_reason", "stop_reason", "done_reason")
COUNTS = ("completion_tokens", "output_tokens", "eval_count", "tokens_predicted", "generated_tokens", "num_tokens")
PROMPTS = ("prompt_tokens", "input_tokens", "prompt_eval_count", "tokens_evaluated")
CONTAINERS = ("choices", "delta", "message", "tool_calls", "function", "token", "content_block", "usage", "response",
              "details", "output", "content", "item", "timings")  # fmt: skip
SURE = 0.8  # the part of the estimate reported early
DEEPEST, LONGEST = 10, 64  # nested values, and items of a list, that are read
MOST_TOKENS = 1 << 18  # of one answer


class Counter:
    """Reads the body of one answer, in the pieces in which it arrives; `tokens` never falls.

    `hidden` is the usual number of tokens per character beyond one for each event. It is 0.0 if each event has one token.
    """

    def __init__(self, content_type: str, status: int, hidden: float = 0.0) -> None:
        self.is_stream = content_type.partition(";")[0].strip().lower() in STREAMS
        self.tokens = 0
        self.prompt_tokens: int | None = None
        self.reason: str | None = None
        self.is_error = status >= 400
        self.reported: int | None = None  # the upstream's own count
        self._events, self._length, self._bytes, self._usual = 0, 0, 0, hidden
        self._rest = bytearray()
        self._is_empty = True  # nothing of an answer was seen, other than counts
        self._is_lost = False  # a part was too large to read

    def feed(self, data: bytes) -> int:
        """Take in a piece; return how many tokens are new in it."""
        self._bytes += len(data)
        if self._is_lost:
            return 0
        before = self.tokens
        self._rest += data
        if self.is_stream:
            end = self._rest.rfind(b"\n") + 1
            lines, self._rest = bytes(self._rest[:end]), self._rest[end:]
            for line in lines.split(b"\n"):
                self._line(line.strip())
        if len(self._rest) > LARGEST:
            self._is_lost, self._rest = True, bytearray()
        return self.tokens - before

    def end(self) -> int:
        """Take in the end of the body; return the tokens that were not counted yet."""
        before, rest = self.tokens, bytes(self._rest).strip()
        if rest and self.is_stream:
            self._line(rest)
        elif rest:
            length = self._read(_json(rest))
            self._count(-(-length // 4) if self.reported is None and not self.is_error else 0)
        self._count(self.reported or round(self._guess))
        return self.tokens - before

    def _count(self, tokens: int) -> None:
        """Raise the number of tokens, as far as the bytes and texts that passed bear it out."""
        self.tokens = max(self.tokens, 0 if self._is_empty else min(tokens, self._bytes, MOST_TOKENS))

    def _line(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            line = line[5:].lstrip()
        if not line.startswith(b"{"):
            return
        length = self._read(_json(line))
        self._events, self._length = self._events + (length > 0), self._length + length
        self._count(max(self._events, int(SURE * self._guess), self.reported or 0))

    @property
    def _guess(self) -> float:
        is_guess = self._usual and (self.reported or 0) <= 1  # some begin with a count of 0 or 1
        return self._events + self._length * self._usual if is_guess else 0.0

    @property
    def hidden(self) -> float | None:
        """The tokens per character of a stream beyond one for each event, once the upstream has sent its count."""
        # In a mean of many answers, one that hides many tokens tells little.
        reported = self.reported or 0  # a token has at least a byte, a character at most four
        is_sound = self._events and 0 < reported <= 4 * self._length
        return max(0, reported - self._events) / self._length if is_sound else None

    def _read(self, value: Any, depth: int = 0) -> int:
        """Note counts and reasons in a JSON value; return how many characters of text it carries."""
        if isinstance(value, list) and depth < DEEPEST:
            return sum(self._read(item, depth + 1) for item in value[:LONGEST])
        if not isinstance(value, dict) or depth >= DEEPEST:
            return 0
        self.is_error |= depth == 0 and value.get("error") is not None
        found = 0
        for name, item in value.items():
            if isinstance(item, str) and name in TEXTS:
                found += len(item)
                self._is_empty &= not item
            elif isinstance(item, str) and name in REASONS and item:
                self.reason = item
            elif type(item) is int and name in COUNTS:
                self.reported = max(self.reported or 0, item)
            elif type(item) is int and name in PROMPTS:
                self.prompt_tokens = item
            elif isinstance(item, str) and name in OTHERS:
                self._is_empty &= not item
            elif name in CONTAINERS:
                found += self._read(item, depth + 1)
        return found


def _json(text: bytes) -> Any:
    try:
        check_structure(text)
        return json.loads(text)
    except (ValueError, RecursionError, ApiError):
        return None
