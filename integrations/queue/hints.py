"""What a scheduler may know of a request to a server that is not ours: an estimate of its length, its limits, its hints.

Pure: a body and headers come in, numbers go out. The body itself is never changed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple
from zlib import crc32

from api.schemas.scheduling_hints import names_in
from scheduling.latest import Latest

# About one match per token of English text with a vocabulary of 32,000 to 150,000 tokens.
PIECE = re.compile(r"[^\W\d_]{1,7}|\d{1,3}|[^\w\s]|_|\n+")
SHOWN = 200_000  # characters that are cut into pieces; what follows counts by length alone
PROMPTS = ("system", "instructions", "prompt", "input", "inputs", "messages", "tools")
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "max_new_tokens", "num_predict",
          "num_tokens")  # fmt: skip
CLIENT, PRIORITY, SLO = "X-Queue-Client", "X-Queue-Priority", "X-Queue-Slo"
HINTS = frozenset(name.lower() for name in (CLIENT, PRIORITY, SLO))  # headers that end here
KEYS = ("Authorization", "X-Api-Key", "Api-Key")
CLIENT_BY = ("header", "key", "address")
MOST_PRIORITY, MOST_TOKENS, MOST_CHOICES, LONGEST_NAME = 1000, 1 << 20, 128, 200


class RequestHints(NamedTuple):
    """`prompt` are stand-ins for token ids: about as many as the prompt has tokens, and equal where texts are equal."""

    prompt: list[int]
    limit: int | None  # tokens of the answer, None if the client named no length
    choices: int
    streams: bool
    client: str
    priority: int
    slo_s: float | None
    session: str
    model: str
    program: str = ""
    parent: str = ""  # the session that started this one


def read_hints(
    fields: Mapping[str, Any], headers: Mapping[str, str], peer: str, client_by: str = "header"
) -> RequestHints:
    """Return what a body and its headers ask for; hints of the wrong type count as absent.

    A client is its header, else `user`, else its key, else its address; with `client_by` only its key, or only its address.
    """
    return RequestHints(
        prompt=pieces("\n".join(text for name in PROMPTS for text in _texts(fields.get(name), 0))) or [0],
        limit=_limit(fields),
        choices=max(1, min(_whole(fields.get("n")) or 1, MOST_CHOICES)),
        streams=bool(fields.get("stream")),
        client=_client(fields, headers, peer, client_by),
        priority=int(_number(headers.get(PRIORITY), fields.get("priority"), MOST_PRIORITY) or 0),
        slo_s=max(0.0, _number(headers.get(SLO), fields.get("slo_s"), 1e6) or 0.0) or None,
        model=_name(fields.get("model")),
        **names_in(headers.get, _name(fields.get("program")), _name(fields.get("session") or fields.get("session_id"))),
    )


def _texts(value: Any, depth: int) -> Iterator[str]:
    """Yield the texts in a prompt, whichever dialect it is in: OpenAI, Anthropic, Ollama, llama.cpp or TGI."""
    if isinstance(value, str):
        yield value
    elif type(value) is int:
        yield str(value)  # a token id
    elif depth < 8 and isinstance(value, list):
        for item in value:
            yield from _texts(item, depth + 1)
    elif depth < 8 and isinstance(value, Mapping):
        for key, item in value.items():
            if key not in ("type", "image_url", "id"):
                yield from _texts(item, depth + 1)


def pieces(text: str) -> list[int]:
    """Return a number for each piece of a text."""
    found = PIECE.findall(text[:SHOWN])
    numbers = {piece: crc32(piece.encode("utf-8", "replace")) for piece in set(found)}
    return [numbers[piece] for piece in found] + [0] * min(max(0, len(text) - SHOWN) // 4, MOST_TOKENS)


def _limit(fields: Mapping[str, Any]) -> int | None:
    parts = (fields, fields.get("options"), fields.get("parameters"))  # of Ollama and of TGI
    named = (_whole(part.get(name)) for part in parts if isinstance(part, Mapping) for name in LIMITS)
    return next((min(number, MOST_TOKENS) for number in named if number is not None and number > 0), None)


def _client(fields: Mapping[str, Any], headers: Mapping[str, str], peer: str, client_by: str) -> str:
    named = headers.get(CLIENT) or fields.get("user") or fields.get("safety_identifier")
    if client_by == "header" and isinstance(named, str) and named:
        return named[:LONGEST_NAME]
    key = hashed_key(headers)
    return f"key-{key[:8]}" if key and client_by != "address" else peer


def hashed_key(headers: Mapping[str, str]) -> str:
    """Return a hash of a request's key, empty without one."""
    key = next((headers[name] for name in KEYS if headers.get(name)), "")
    return key and blake2b(key.encode("utf-8", "replace"), digest_size=16).hexdigest()


def _number(header: str | None, field: Any, most: float) -> float | None:
    try:
        number = float(field if header is None else header)
    except (TypeError, ValueError, OverflowError):
        return None
    return max(-most, min(number, most)) if math.isfinite(number) else None


def _name(value: Any) -> str:
    return value[:LONGEST_NAME] if isinstance(value, str) else ""


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


class Means:
    """A running mean for each of the latest 64 models, such as of the tokens that a prompt has beyond its text."""

    def __init__(self) -> None:
        self._means = Latest[str, float](64)

    def of(self, model: str) -> float:
        """Return the mean of a model, 0 before anything is known of it."""
        return self._means.get(model, 0.0)

    def learn(self, model: str, value: float) -> None:
        """Note the value of one more answer of a model."""
        mean = self._means.get(model, value)
        self._means[model] = mean + 0.1 * (value - mean)


class Allowance:
    """Tokens per minute for each client: a bucket that holds a minute's worth, paid with what a request really took."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self._rate, self._most, self._clock = per_minute / 60, per_minute, clock
        self._left = Latest[str, tuple[float, float]](10_000)  # tokens, and when

    def _now(self, client: str) -> float:
        tokens, at = self._left.get(client, (self._most, 0.0))
        return min(self._most, tokens + (self._clock() - at) * self._rate)

    def wait(self, client: str) -> float:
        """Return in how many seconds a client may ask again, 0 if now."""
        return max(0.0, -self._now(client) / self._rate) if self._rate else 0.0

    def pay(self, client: str, tokens: int) -> None:
        """Take tokens from a client; what it owes delays its next request."""
        if self._rate:
            self._left[client] = self._now(client) - tokens, self._clock()
