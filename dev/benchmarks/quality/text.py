"""The text that a model is judged by, from files that are on every machine.

bard is judged by the tenth of its plays that it was not trained on; any other model by the reference of the Python that
runs this, English prose with code. It must not know models beyond their name.
"""

from __future__ import annotations

import platform
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from models.sources.catalog import BARD

HELD_OUT = BARD / "held_out.txt"
EXCERPT = slice(100_000, 130_000)  # of the reference, in characters
PROMPT_TOKENS = (8, 64)


class Judged(NamedTuple):
    """A text, and what it is."""

    text: str
    name: str


def read(model: str, file: Path | None) -> Judged:
    """Return the text in `file`, or for None the one that belongs to `model`."""
    if file is not None:
        return Judged(file.read_text("utf-8"), file.name)
    if model == "bard":
        return Judged(HELD_OUT.read_text("utf-8"), "bard's held-out plays")
    from pydoc_data import topics

    reference = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return Judged(reference[EXCERPT], f"the reference of Python {platform.python_version()}")


def prompts(ids: Sequence[int], count: int, seed: int) -> list[list[int]]:
    """Return `count` pieces of the text, of 8 to 64 tokens."""
    rng = random.Random(seed)
    result = []
    for _ in range(count):
        length = min(rng.randint(*PROMPT_TOKENS), len(ids))
        start = rng.randint(0, len(ids) - length)
        result.append(list(ids[start : start + length]))
    return result
