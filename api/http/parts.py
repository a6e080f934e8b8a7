"""Large JSON answers, written part by part: encoding one at once would hold the interpreter for all that time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from flask import Response

from api.http import large
from observe.feed import dumps


def items(values: Iterable[Any], together: int) -> Iterator[str]:
    """Yield the items of a JSON list without its brackets, `together` items at a time."""
    remaining, comma = iter(values), ""
    while part := list(islice(remaining, together)):
        yield comma + dumps(part)[1:-1]
        comma = ","


def response(parts: Iterable[str], is_large: bool) -> Response:
    """Return the answer that joins `parts`: with its length, or as a stream if it is large."""
    content = _in_turn(iter(parts)) if is_large else "".join(parts)
    return Response(content, mimetype="application/json")


def _in_turn(parts: Iterator[str]) -> Iterator[str]:
    """Yield parts, and make none of them while another thread does large work."""
    while True:
        with large.turn:
            part = next(parts, None)
        if part is None:
            return
        yield part
