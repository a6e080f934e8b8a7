"""The lines of a batch in OpenAI's format: requests, their answers, and which of them have been answered.

Files are read line by line: of a line only eight bytes stay in memory. This module must not know how requests are sent.
Both the client and the server read batches with it.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import uuid
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, BinaryIO

MAX_LINE = 32 << 20  # bytes
BLOCK = 1 << 20  # bytes that are counted at once
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


def _continue() -> None:
    """Let a long loop go on."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How lines are read: the most bytes of one, what parses it (raising ValueError), and a call before each that may raise."""

    longest: int = MAX_LINE
    parse: Callable[[bytes], Any] = json.loads
    check: Callable[[], None] = _continue


def count_lines(file: BinaryIO, most: int, check: Callable[[], None] = _continue) -> int:
    """Return the number of lines, blank ones too, or a larger number than `most` as soon as there are more."""
    file.seek(0)
    lines, last = 0, b"\n"
    while lines <= most and (data := file.read(BLOCK)):
        check()
        lines += data.count(b"\n")
        last = data[-1:]
    return lines + (last != b"\n")


def numbered(file: BinaryIO, limits: Limits) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, with their numbers; of one that is too long, only its beginning."""
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

    `total` is the number of its lines, and `answered` how many had an answer before. Hashes of 64 bits stand for ids; where
    two lines share one, hashes of 128 bits are compared. Later lines with the same id are bad lines.
    """

    def __init__(
        self, file: BinaryIO, answers: Iterable[BinaryIO], endpoint: str = "", limits: Limits | None = None
    ) -> None:
        self._file = file
        self._endpoint = endpoint
        self._limits = limits or Limits()
        file.seek(0)
        hashes = _sorted(array("Q", (_hash(self._key_of(*each)) for each in numbered(file, self._limits))))
        self.total = len(hashes)
        self._shared = {one for one, other in pairwise(hashes) if one == other}
        del hashes
        done = array("Q")
        self._done_ids: set[bytes] = set()
        for each in answers:
            for key in answered_keys(each):
                done.append(_hash(key))
                if done[-1] in self._shared:
                    self._done_ids.add(_digest(key))
        self.answered = len(done)
        self._done = _sorted(done)

    def __iter__(self) -> Iterator[Line | BadLine]:
        """Yield each line without an answer, or what is wrong with it."""
        self._file.seek(0)
        seen: set[bytes] = set()
        for number, data in numbered(self._file, self._limits):
            try:
                line = parse(number, data, self._endpoint, self._limits)
                if _hash(line.custom_id) in self._shared:
                    digest = _digest(line.custom_id)
                    if digest in seen:
                        reason = f"the custom_id {line.custom_id[:80]!r} is that of an earlier line. Give each its own"
                        raise BadLine(number, "duplicate_custom_id", reason, line.custom_id)
                    seen.add(digest)
                if not self._is_done(line.custom_id):
                    yield line
            except BadLine as bad:
                if not self._is_done(bad_key(number)):
                    yield bad

    def _key_of(self, number: int, data: bytes) -> str:
        """Return the id of a line, or what stands for a bad one."""
        try:
            return parse(number, data, self._endpoint, self._limits).custom_id
        except BadLine:
            return bad_key(number)

    def _is_done(self, key: str) -> bool:
        hashed = _hash(key)
        if hashed in self._shared:
            return _digest(key) in self._done_ids
        at = bisect_left(self._done, hashed)
        return at < len(self._done) and self._done[at] == hashed


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


def _sorted(numbers: array[int]) -> array[int]:
    import numpy as np  # here, because it takes longer to load than all else that the server needs first

    result = array("Q")
    result.frombytes(np.sort(np.frombuffer(numbers, np.uint64)).tobytes() if numbers else b"")
    return result


def _hash(key: str) -> int:
    return int.from_bytes(_digest(key, 8), "little")


def _digest(key: str, size: int = 16) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=size).digest()
