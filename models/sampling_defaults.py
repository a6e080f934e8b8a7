"""How a model's authors sample from it: the values in generation_config.json, or in the metadata of a GGUF file.

Requests that name no value use these, as with vLLM. `do_sample` and everything else in the file is left to others. It
must not know requests, nor how a token is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from models.sources.checkpoint import CheckpointError, read_json


class Rule(NamedTuple):
    """The bounds of a value, in words and as a check, and its key in the metadata of a GGUF file."""

    gguf: str
    bounds: str
    holds: Callable[[float], bool]


RULES = {
    "temperature": Rule("temp", "a number from 0 to 2", lambda value: 0 <= value <= 2),
    "top_k": Rule("top_k", "a whole number of at least -1", lambda value: value >= -1 and value == int(value)),
    "top_p": Rule("top_p", "a number above 0, at most 1", lambda value: 0 < value <= 1),
    "min_p": Rule("min_p", "a number from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": Rule("penalty_repeat", "a number above 0", lambda value: value > 0),
}
FILE = "generation_config.json"


def read(source: Path | None) -> dict[str, float]:
    """Return the values that a model's folder or GGUF file names, by parameter; none for random weights (no `source`).

    Raises CheckpointError for a value that cannot be used.
    """
    if source is None:
        return {}
    if not source.is_dir():
        from models.gguf import gguf_reader

        metadata = gguf_reader.read(source).metadata
        named = {name: metadata.get(f"general.sampling.{rule.gguf}") for name, rule in RULES.items()}
        return _checked(named, source)
    file = source / FILE
    return _checked(read_json(file), file) if file.is_file() else {}


def _checked(named: Mapping[str, Any], file: Path) -> dict[str, float]:
    """Return the values that are set. GGUF files store float32, which is rounded to what its author wrote."""
    found: dict[str, float] = {}
    for name, rule in RULES.items():
        value = named.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not (is_number and rule.holds(value)):
            raise CheckpointError(
                f"{name} in {file} is {str(value)[:40]!r}, but must be {rule.bounds}. Correct the file"
            )
        found[name] = int(value) if name == "top_k" else round(float(value), 6)
    return found
