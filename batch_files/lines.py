"""The lines of a batch in OpenAI's format: requests, their answers, and which of them have been answered.

Files are read line by line: of a line only a hash of its id stays in memory. This module must not know how requests are
sent.
Both the client and the server read batches with it.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

MAX_LINE = 32 << 20  # bytes
LONGEST_ID = 512
EXAMPLE = '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}'


@dataclass(frozen=True, slots=True)
class Line:
    """A request of a batch; `number` counts from 1."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


class BadLine(ValueError):
    """A line that cannot be sent; the message names its number and the remedy."""

    def __init__(self, number: int, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(f"line {number}: {message}")
        self.number = number
        self.code = code
        self.custom_id = custom_id


class ForeignFile(ValueError):
    """A file of answers has a line that is not one; the arguments are the file's name and the number of the line."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How lines are read: the most bytes of one, what parses it (raising ValueError), and a call before each that may raise."""

    longest: int = MAX_LINE
    parse: Callable[[bytes], Any] = json.loads
    check: Callable[[], object] = int


def numbered(file: BinaryIO, limits: Limits) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, with their numbers; of one that is too long, only its beginning."""
    file.seek(0)
    number = 0
    while data := file.readline(limits.longest + 1):
        number += 1
        limits.check()
        more = data
        while len(more) > limits.longest and not more.endswith(b"\n"):
            more = file.readline(limits.longest + 1)
        if number == 1:
            data = data.removeprefix(codecs.BOM_UTF8)
        if data.strip():
            yield number, data


def parse(number: int, data: bytes, endpoint: str, limits: Limits) -> Line:
    """Return the request of a line, for `endpoint` if there is one; raise BadLine."""
    if len(data) > limits.longest:
        raise BadLine(number, "line_too_long", f"more than {limits.longest:,} bytes. Shorten the request")
    try:
        fields = limits.parse(data)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise BadLine(number, "invalid_json_line", f"invalid JSON ({reason}). Use a line such as {EXAMPLE}") from None
    except ValueError as error:
        raise BadLine(number, "invalid_json_line", str(error)) from None
    if not isinstance(fields, dict):
        raise BadLine(number, "invalid_json_line", f"not a JSON object. Use a line such as {EXAMPLE}")
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= LONGEST_ID or "\0" in custom_id:
        reason = f"custom_id must be a string of 1 to {LONGEST_ID} characters without NUL. Give each line its own"
        raise BadLine(number, "invalid_custom_id", reason)
    url, body = fields.get("url"), fields.get("body")
    for is_wrong, code, reason in (
        (fields.get("method", "POST") != "POST", "invalid_method", 'method must be "POST"'),
        (not _is_path(url), "invalid_url", 'url must be a path such as "/v1/chat/completions"'),
        (bool(endpoint) and url != endpoint, "mismatched_url", f"url must be {endpoint!r}, as for the whole batch"),
        (not isinstance(body, dict), "missing_body", "body must be an object, the body of the request"),
        (isinstance(body, dict) and bool(body.get("stream")), "invalid_body", "body.stream must be false"),
    ):
        if is_wrong:
            raise BadLine(number, code, f"{reason}. Correct the line", custom_id)
    return Line(number, custom_id, str(url), dict(body or {}))


def _is_path(url: object) -> bool:
    return isinstance(url, str) and url.startswith("/") and url[1:2] != "/" and url.isprintable() and " " not in url


def answer(custom_id: str | None, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """Return the line of a response."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": new_id(), "custom_id": custom_id, "response": response, "error": None}


def failed(bad: BadLine) -> dict[str, Any]:
    """Return the line of a request that cannot be sent."""
    error = {"code": bad.code, "message": str(bad), "line": bad.number}
    return {"id": new_id(), "custom_id": bad.custom_id, "response": None, "error": error}


def expired(line: Line) -> dict[str, Any]:
    """Return the line of a request that was not computed in time."""
    error = {
        "code": "batch_expired",
        "message": "This request could not be executed before the completion window expired.",
    }
    return {"id": new_id(), "custom_id": line.custom_id, "response": None, "error": error}


def to_json(line: dict[str, Any]) -> bytes:
    """Return a line as JSON in UTF-8, where half a surrogate pair stays the escape that it was in the input."""
    return json.dumps(line, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "backslashreplace")


def new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


class Pending:
    """The lines of an input that have no answer yet, each once.

    `total` is the number of its lines, and `answered` how many had an answer before. Hashes of 128 bits stand for ids.
    Later lines with the same id are bad lines.
    """

    def __init__(
        self, file: BinaryIO, answers: Iterable[BinaryIO], endpoint: str = "", limits: Limits | None = None
    ) -> None:
        self._file = file
        self._endpoint = endpoint
        self._limits = limits or Limits()
        self.total = sum(1 for _ in numbered(file, self._limits))
        self._done = {_digest(key) for each in answers for key in answered_keys(each)}
        self.answered = len(self._done)

    def __iter__(self) -> Iterator[Line | BadLine]:
        """Yield each line without an answer, or what is wrong with it."""
        seen: set[bytes] = set()
        for number, data in numbered(self._file, self._limits):
            one: Line | BadLine
            try:
                one = parse(number, data, self._endpoint, self._limits)
                digest = _digest(one.custom_id)
                if digest in seen:
                    reason = f"the custom_id {one.custom_id[:80]!r} is that of an earlier line. Give each its own"
                    raise BadLine(number, "duplicate_custom_id", reason, one.custom_id)
                seen.add(digest)
            except BadLine as bad:
                one, digest = bad, _digest(bad_key(number))
            if digest not in self._done:
                yield one


def bad_key(number: int) -> str:
    """Return what stands for a bad line: its number, after a character that no id of a good line begins with."""
    return f"\0{number}"


def answered_keys(file: BinaryIO) -> Iterator[str]:
    """Yield the id of each answer in a file, or what stands for a bad line."""
    for number, data in enumerate(file, 1):
        try:
            fields = json.loads(data)
            line = (fields["error"] or {}).get("line")
            yield fields["custom_id"] + "" if line is None else bad_key(line)
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            raise ForeignFile(file.name, number) from None


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
