"""What a workload is made of: the arguments of a draw, and the requests that it gives. No workload is here."""

from dataclasses import dataclass

import numpy as np

from ..data import Chat
from .corpus import USUAL_CONTEXT, Corpus


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of a workload; only a trace sets `at`, its time in seconds."""

    prompt: str
    num_tokens: int
    user: str = ""
    at: float = 0.0
    chat: Chat | None = None


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
