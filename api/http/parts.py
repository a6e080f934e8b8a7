"""Large JSON answers, written part by part: encoding one at once would hold the interpreter for all that time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from flask import Response

from observe.feed import dumps


def items(values: Iterable[Any], together: int) -> Iterator[str]:
    """Yield the items of a JSON list without its brackets, `together` items at a time."""
    remaining, comma = iter(values), ""
    while part := list(islice(remaining, together)):
        yield comma + dumps(part)[1:-1]
        comma = ","


def response(parts: Iterable[str]) -> Response:
    """Return the answer that joins `parts`."""
    return Response("".join(parts), mimetype="application/json")
