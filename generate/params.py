"""The sampling parameters of one request, for real models and mock models alike.

It must not know tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request draws its tokens. Temperature 0 is greedy; every other default changes nothing.

    `banned_ids` are excluded from the first `min_tokens` tokens. `logprobs` is the number of alternatives whose log
    probabilities are returned beside each token's, None for no log probabilities at all; `prompt_logprobs` is the same
    for the prompt's tokens. `grammar` is the `Constraint` (`generate/grammar.py`) of the answer's form, None for any text.
    With `pooling` no token is drawn: the sum of the prompt's final hidden states ("mean") or the last one ("last"),
    scaled to length 1, is the output, and `max_tokens` must be 0.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    banned_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Any = None
    pooling: str | None = None
    is_processed: bool = field(init=False)
    is_filtered: bool = field(init=False)
    is_drawn: bool = field(init=False)  # one token follows the prompt, and nothing else is returned about it
    inverse_temperature: float = field(init=False)  # the factor of the logits before the draw, 0 for greedy

    def __post_init__(self) -> None:
        processed = bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or (self.min_tokens and self.banned_ids)
        )
        filtered = self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.typical_p < 1)
        object.__setattr__(self, "is_processed", processed)
        object.__setattr__(self, "is_filtered", filtered)
        object.__setattr__(self, "is_drawn", (self.pooling, self.logprobs, self.prompt_logprobs) == (None, None, None))
        object.__setattr__(self, "inverse_temperature", 1 / self.temperature if self.temperature > 0 else 0.0)


GREEDY = SamplingParams(temperature=0.0)
