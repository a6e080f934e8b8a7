"""A model without weights: it takes the time that a cost model predicts, and gives tokens made of nothing.

In the server it sleeps, so that `--model mock:llm-mock` or `mock:FILE.json` serves the real API at the predicted speed;
in the simulator it moves the clock. The tokens depend on the prompt and the place only, so that an answer is the same
whatever else is in the batch. It must not know tokenizers, pages or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from scheduling.iteration import Plan
from scheduling.scheduler import Output
from scheduling.sequence import Sequence
from simulate import costs
from simulate.costs import Cost, Host

GPT2_VOCAB, GPT2_CONTEXT = 50257, 1024
PREFIX = "mock:"


class VirtualClock:
    """A clock that only `sleep` moves."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class MockModel:
    """Computes plans in the time that `cost` says, on the clock that `sleep` moves.

    A sleep that lasted too long makes the next one shorter, so that the steps keep their pace on the whole.
    """

    def __init__(
        self,
        cost: Cost | Callable[[Plan], float],
        *,
        name: str = "mock",
        vocab_size: int = GPT2_VOCAB,
        context: int = GPT2_CONTEXT,
        host: Host | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.cost = cost
        self.name = name
        self.vocab_size = vocab_size
        self.context = context
        self.host = host or Host()
        self._sleep = sleep
        self._clock = clock
        self._late = 0.0

    def forward(self, plan: Plan) -> list[Output]:
        """Take the time of a step; return a token for each sequence due, None while its prompt lasts."""
        start = self._clock()
        seconds = self.cost(plan)
        outputs: list[Output] = [
            self.token(seq) if count == seq.pending else None
            for seq, count in zip(plan.sequences, plan.counts)
        ]
        end = start + seconds - self._late
        rest = end - self._clock()
        if rest > 0:
            self._sleep(rest)
        self._late = min(max(0.0, self._clock() - end), seconds)
        return outputs

    def token(self, seq: Sequence) -> int:
        """Return the token that this sequence gets next: a fixed mixture of its last prompt token and the place."""
        mixed = (seq.prompt_ids[-1] * 2654435761 + len(seq.output_ids) * 40503) & 0xFFFFFFFF
        return (mixed ^ (mixed >> 15)) % (self.vocab_size - 1)  # never the last, which ends a text


def load(name: str) -> MockModel:
    """Return the model that `mock:llm-mock`, `mock:FILE.json` or the bare name means; ValueError with the remedy."""
    name = name.removeprefix(PREFIX)
    host = costs.load(name)[1] if name.endswith(".json") else Host()
    return MockModel(costs.make(name), name=PREFIX + name, host=host)
