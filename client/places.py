"""Where a value is in an object of JSON, whatever made it: a place is a path of keys and of positions in lists.

"a|b" is b where a has nothing, "a*b*c" the product of places and numbers, "!a" is true where a is false.
"""

from __future__ import annotations

import math
from typing import Any

NAN = math.nan


def find(row: Any, place: str) -> Any:
    """Return what an object has at a place, None if nothing."""
    for way in place.split("|"):
        value = _product(row, *way.split("*"))
        if value is not None and value != "":
            return value
    return None


def _product(row: Any, path: str, *others: str) -> Any:
    value = row
    for key in path.removeprefix("!").split("/"):
        try:
            value = value[int(key) if isinstance(value, list) else key]
        except (LookupError, TypeError, ValueError):
            return None
    if others:
        factor = math.prod(number(n) if math.isfinite(number(n)) else number(find(row, n)) for n in others)
        if isinstance(value, list):
            return [factor * number(one) for one in value]
        product = factor * number(value)
        return product if math.isfinite(product) else None
    return not value if path[0] == "!" else value


def number(value: Any) -> float:
    """Return a finite number, which may be text; NaN for anything else."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return NAN
    return found if abs(found) < 1e300 else NAN
