"""Large answers of JSON, written part by part: encoding one at once would hold the interpreter for all that time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from flask import Response

from api.http import large
from observe.feed import dumps


def listed(items: Iterable[Any], together: int) -> Iterator[str]:
    """Yield what is between the brackets of a JSON list, so many items at a time."""
    items, comma = iter(items), ""
    while part := list(islice(items, together)):
        yield comma + dumps(part)[1:-1]
        comma = ","


def response(parts: Iterable[str], is_large: bool) -> Response:
    """Return an answer that `parts` join to: with its length, or if it is large, sent as they are made."""
    content = _in_turn(iter(parts)) if is_large else "".join(parts)
    return Response(content, mimetype="application/json")


def _in_turn(parts: Iterator[str]) -> Iterator[str]:
    """Yield parts, none of which is made while another thread does large work."""
    while True:
        with large.turn:
            part = next(parts, None)
        if part is None:
            return
        yield part
