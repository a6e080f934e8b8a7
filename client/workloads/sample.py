"""What a workload is made of: its name, the arguments of a draw, and the requests that it gives. No workload is here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from terminal.options import nearest

from ..data import Call, Chat
from .corpus import USUAL_CONTEXT, Corpus


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of a workload; only a trace sets `at`, its time in seconds."""

    prompt: str
    num_tokens: int
    user: str = ""
    at: float = 0.0
    chat: Chat | None = None
    call: Call | None = None


@dataclass(frozen=True, slots=True)
class Draw:
    """The arguments of a workload: the number of requests, the random generator, the text and the model's context."""

    count: int
    rng: np.random.Generator
    corpus: Corpus
    context: int = USUAL_CONTEXT

    def samples(self, prompts: np.ndarray, outputs: np.ndarray) -> list[Sample]:
        """Cut a prompt of each length from the text."""
        return [Sample(self.corpus.piece(self.rng, int(p)), int(o)) for p, o in zip(prompts, outputs)]


class UnknownWorkload(ValueError):
    """No workload has this name."""


@dataclass(frozen=True, slots=True)
class Workload:
    """How the requests of a workload are drawn, the form of its name, and the highest values of the numbers in it."""

    draw: Callable[..., list[Any]]
    form: str
    highest: tuple[int, ...] = ()


def parse(spec: str, known: Mapping[str, Workload]) -> tuple[str, list[int]]:
    """Return the name and the numbers of a workload; ValueError for an unknown one, or numbers out of bounds."""
    name, *words = spec.split(":")
    if name not in known:
        raise UnknownWorkload(
            f"unknown workload {name!r}.{nearest(name, known)} Use one of {', '.join(known)}, sharegpt:FILE, trace:FILE"
        )
    form, highest = known[name].form, known[name].highest
    if len(words) > len(highest):
        raise ValueError(f"{spec!r} has too many numbers. Use {form}")
    numbers = []
    for word, most in zip(words, highest):
        if not (word.isdecimal() and 1 <= int(word) <= most):
            raise ValueError(f"{spec!r} has {word!r}. Use {form}, numbers from 1 to {most:,}")
        numbers.append(int(word))
    return name, numbers
