"""Traces of real services, read line by line: lines that cannot be read are reported by number and skipped.

The content determines the format: CSV with a header (Azure's traces in their own columns or in seconds, VTC's, our
`requests.csv`, the simulator's, which may have priorities), and JSON lines (Mooncake's in milliseconds, Qwen's with
`chat_id` in seconds, or ours with `at`, `num_tokens` and `prompt` or `prompt_tokens`). A date without a zone is in UTC,
wherever it is read. This module must not know how prompts are made.
"""

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

MOST_LINES_NAMED = 5
MOST_TOKENS = 10_000_000  # of a prompt or an answer: no published model holds more, and the simulator keeps every token
USE = (
    "Use a CSV with the columns arrival_s, prompt_tokens and output_tokens, or JSON lines with at, prompt_tokens and "
    "num_tokens"
)
# Date, time, fraction of any length and zone. Python 3.10 reads neither Z nor Azure's seven digits of a second.
STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[t ](\d\d:\d\d(?::\d\d)?)(?:[.,](\d+))?)? ?(?:(z|utc|gmt)|([+-])(\d\d):?(\d\d)?)?",
    re.ASCII | re.IGNORECASE,
)
NUMBER, ZONED, UNZONED = "a number", "a date with a zone", "a date without a zone"
MILLISECONDS = "a number of milliseconds"
BLOCK, QWENS_BLOCK = 512, 16  # tokens of a block in Mooncake's traces, and in Qwen's
SHORT_GAP = 0.01  # seconds between requests, on average, below which milliseconds are doubtful


@dataclass(frozen=True, slots=True)
class Row:
    """A request of a trace: seconds after the first, lengths in tokens, prompt or prefix blocks.

    Only the simulator uses the priority, and `constrained`: whether the answer follows a grammar. `limit` is the request's
    `max_tokens`, which an answer that the model ended did not reach: None if its client set none, 0 if the trace does not
    say.
    """

    at: float
    prompt_tokens: int
    num_tokens: int
    prompt: str | None = None
    blocks: tuple[int, ...] = ()
    block: int = BLOCK  # tokens of each
    user: str = ""
    priority: int = 0
    limit: int | None = 0
    form: str = NUMBER  # of its time in the file
    constrained: bool = False
    id: str = ""  # by which others name it in `after`, the calls that it waits for, and `wait` seconds more
    session: str = ""
    after: tuple[str, ...] = ()
    wait: float = 0.0
    # Of a span, which waits for those of its session that ended before it began. A turn of Qwen's ends when it begins.
    ended: float | None = None


@dataclass(slots=True)
class Trace:
    """The content of a file: its rows by time, and the lines that could not be read, by number."""

    rows: list[Row]
    bad: list[tuple[int, str]] = field(default_factory=list)

    def notes(self) -> list[str]:
        """Return what was skipped, and a doubt about the unit of the times."""
        found = skipped(self.bad, len(self.rows))
        times = [row.at for row in self.rows if row.form == MILLISECONDS and row.at < math.inf]
        if times and 0 < times[-1] < SHORT_GAP * (len(times) - 1):
            found.append(
                f"{(len(times) - 1) / times[-1]:,.0f} requests per second, as the times of the trace are read as "
                "milliseconds. If they are seconds, play it with --speed 0.001, or as trace:FILE:0.001"
            )
        return found


def skipped(bad: list[tuple[int, str]], good: int, units: str = "lines") -> list[str]:
    """Return a note about the skipped lines or entries of a file; none if all could be read."""
    if not bad:
        return []
    unit, more = {"lines": "line", "entries": "entry"}[units], len(bad) - MOST_LINES_NAMED
    named = "; ".join(f"{unit} {n}: {why}" for n, why in bad[:MOST_LINES_NAMED])
    return [
        f"{len(bad)} of {len(bad) + good} {units} of the trace skipped: {named}"
        + (f"; and {more} more" if more > 0 else "")
    ]


def read(path: Path, most: int | None = None) -> Trace:
    """Read a trace: at most its first `most` requests, or all if they are of programs, whose rows may be far apart.

    ValueError when nothing can be used, or times are of two forms.
    """
    trace, programs = Trace([]), False
    rows: list[Row] = []
    began_at = 0
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            for number, make in _lines(file):
                try:
                    row = make()
                except (KeyError, TypeError, ValueError, RecursionError, csv.Error) as error:
                    trace.bad.append((number, _reason(error)))
                    continue
                rows.append(row)
                began_at = began_at or number
                if row.form != rows[0].form:
                    raise ValueError(
                        f"{str(path)!r}, line {number}: the time is {row.form}, but that of line {began_at} is "
                        f"{rows[0].form}. Write all times in one form"
                    )
                programs |= bool(row.id or row.session)
                if most and len(rows) >= most and not programs:
                    break
    except OSError as error:
        raise ValueError(f"cannot read {str(path)!r}: {error.strerror}. Use another trace file") from error
    except _NotLines as error:
        raise ValueError(f"{str(path)!r}, {error}") from None
    if not rows:
        what = "; ".join(trace.notes()) or "it has no line with one"
        raise ValueError(f"{str(path)!r} has no request: {what}. {USE}")
    rows.sort(key=lambda row: row.at)
    began = rows[0].at
    trace.rows = [
        replace(row, at=row.at - began, ended=None if row.ended is None else row.ended - began) for row in rows
    ]
    return trace


class _NotLines(Exception):
    """The file is neither a CSV nor JSON lines; the message names the line and the remedy."""


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"has no {error.args[0]}"
    if isinstance(error, json.JSONDecodeError):
        return f"invalid JSON: {error.msg}"
    return str(error)[:60] or type(error).__name__


def _lines(file: Any) -> Iterator[tuple[int, Callable[[], Row]]]:
    """Yield the number of each line and a function that reads it."""
    head = next(((i, line) for i, line in enumerate(file, 1) if line.strip()), None)
    if head is None:
        return
    number, first = head
    if first.lstrip().startswith("{"):
        for later, line in enumerate(chain([first], file), number):
            if '"resourceSpans"' in line:
                yield from ((later, make) for make in _spans(line))
            elif line.strip():
                yield later, partial(_from_json, line)
        return
    if first.lstrip().startswith("[") or "\0" in first:
        raise _NotLines(f"line {number}: it is a JSON array, or not text in UTF-8. {USE}")
    try:
        names = [name.strip() for name in _cells(first)]
        for name in names:
            if name and names.count(name) > 1:
                raise ValueError(f"the column {name[:40]!r} appears {names.count(name)} times")
    except (csv.Error, ValueError) as error:
        raise _NotLines(f"line {number}: {_reason(error)}. {USE}") from None
    for later, line in enumerate(file, number + 1):
        if line.strip():
            yield later, partial(_from_csv, names, line)


def _from_csv(names: list[str], line: str) -> Row:
    cells = _cells(line.replace("\0", ""))
    if len(cells) != len(names):
        raise ValueError(f"{len(cells)} columns instead of {len(names)}")
    cell = dict(zip(names, cells))
    output = _first(cell, "asked_tokens", "output_tokens", "GeneratedTokens", "num_tokens", "output_len")
    prompt = _first(cell, "prompt_tokens", "ContextTokens", "prompt_len")
    user = cell.get("user") or cell.get("client") or ""
    at, form = _seconds(cell)
    return Row(
        at,
        _count(prompt, "prompt"),
        _count(output, "output"),
        user=user,
        priority=int(cell.get("priority") or 0),
        limit=_limit(cell),
        form=form,
    )


def _cells(line: str) -> list[str]:
    """Return the cells of a line; csv.Error or ValueError for one that is not a whole row."""
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        if "unexpected end" in str(error):
            raise ValueError("a quoted value does not end on this line") from None
        raise


def _seconds(cell: Mapping[str, str]) -> tuple[float, str]:
    """Return the time of a row in seconds, and the form in which it is written."""
    text = _first(cell, "arrival_s", "TIMESTAMP", "timestamp", "req_time").strip()
    try:
        return _time(float(text)), NUMBER
    except ValueError:
        stamp = STAMP.fullmatch(text)
    if stamp is None:
        raise ValueError(f"time {text[:20]!r} is not a number or a date")
    day, clock, fraction, name, sign, hours, minutes = stamp.groups()
    try:
        at = datetime.fromisoformat(f"{day} {clock or '00:00'}").replace(tzinfo=timezone.utc).timestamp()
    except ValueError as error:
        raise ValueError(f"time {text[:20]!r}: {error}") from None
    if int(hours or 0) > 23 or int(minutes or 0) > 59:
        raise ValueError(f"time {text[-20:]!r} has no zone from -23:59 to +23:59")
    offset = 3600 * int(hours or 0) + 60 * int(minutes or 0)
    at += float(f"0.{fraction or 0}") + (offset if sign == "-" else -offset)
    return at, ZONED if name or sign else UNZONED


def _first(cell: Mapping[str, str], *names: str) -> str:
    for name in names:
        if cell.get(name):
            return cell[name]
    raise KeyError(" or ".join(names))


def _from_json(line: str) -> Row:
    entry = json.loads(line)
    if not isinstance(entry, dict):
        raise ValueError("not a JSON object")
    if "at" in entry:
        prompt = entry.get("prompt")
        if prompt is not None and (not isinstance(prompt, str) or not prompt):
            raise ValueError("prompt is not a string")
        tokens = 0 if prompt else _count(entry["prompt_tokens"], "prompt_tokens")
        output = _count(entry["num_tokens"], "num_tokens")
        if type(constrained := entry.get("form", False)) is not bool:
            raise ValueError("form is not true or false")
        return Row(
            _time(entry["at"]), tokens, output, prompt, user=str(entry.get("user") or ""), limit=_limit(entry),
            constrained=constrained,
        )  # fmt: skip
    after, session, chat = entry.get("wait_for") or [], entry.get("session_id"), entry.get("chat_id")
    # A call that waits for others has no time of its own, and comes after all that have one.
    usual = {"timestamp": math.inf} if after or (session and "delay" in entry) else {}
    at = entry["timestamp_ms"] if "timestamp_ms" in entry else {**usual, **entry}["timestamp"]
    blocks, wait = entry.get("hash_ids") or [], sum(_time(entry.get(name) or 0) for name in ("delay", "tool_wait_ms"))
    if wait < 0 or not isinstance(after, list):
        raise ValueError("delay or tool_wait_ms is below 0, or wait_for is not a list")
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise ValueError("hash_ids is not a list of numbers")
    tokens = _count(entry["input_length"], "input_length")
    block = _count(entry.get("block_size") or (BLOCK if chat is None else QWENS_BLOCK), "block_size")
    if len(blocks) > -(-tokens // block):
        raise ValueError(f"{len(blocks)} hash_ids for {tokens} tokens. Is block_size {block}?")
    row = Row(
        at if at == math.inf else _time(at) / 1000, tokens, _count(entry["output_length"], "output_length"),
        blocks=tuple(blocks), block=block, form=MILLISECONDS, id=str(entry.get("request_id") or ""),
        session=str(session or ""), after=tuple(map(str, after)), wait=wait / 1000,
    )  # fmt: skip
    if chat is None:
        return row
    parents = tuple(str(parent) for parent in [entry.get("parent_chat_id", -1)] if parent != -1)
    return replace(row, at=_time(at), ended=_time(at), form=NUMBER, id=str(chat), after=parents)


def _spans(line: str) -> Iterator[Callable[[], Row]]:
    """Yield a function for each call of a model in a line of spans, as OpenTelemetry's collector writes them."""
    try:
        scopes = [scope for resource in json.loads(line)["resourceSpans"] for scope in resource["scopeSpans"]]
        for span in (span for scope in scopes for span in scope["spans"]):
            values = {pair["key"]: next(iter(pair["value"].values()), None) for pair in span.get("attributes", ())}
            if "gen_ai.usage.output_tokens" in values:
                yield partial(_from_span, span, values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _NotLines(
            f"spans that cannot be read: {_reason(error)}. Use the JSON of OpenTelemetry's collector"
        ) from error


def _from_span(span: Mapping[str, Any], values: Mapping[str, Any]) -> Row:
    begin, end = (int(span[name]) / 1e9 for name in ("startTimeUnixNano", "endTimeUnixNano"))
    prompt, answer = (_count(values[f"gen_ai.usage.{kind}_tokens"], f"{kind}_tokens") for kind in ("input", "output"))
    return Row(begin, prompt, answer, id=str(span["spanId"]), session=str(span["traceId"]), ended=end)


def _limit(entry: Mapping[str, Any]) -> int | None:
    limit = entry.get("max_tokens", 0)
    return None if limit in ("", None) else _count(limit, "max_tokens") if limit else 0


def _count(value: Any, name: str) -> int:
    try:
        count = float(value)
    except (TypeError, ValueError):
        count = math.nan
    if isinstance(value, bool) or not (1 <= count < math.inf) or count != int(count):
        raise ValueError(f"{name} {str(value)[:20]!r} is not a number of tokens")
    if count > MOST_TOKENS:
        raise ValueError(f"{name} {str(value)[:20]} is more than {MOST_TOKENS:,} tokens")
    return int(count)


def _time(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"time {str(value)[:20]!r} is not a number")
    if not math.isfinite(value):
        raise ValueError(f"time {value} is not finite")
    return float(value)
