"""What the handlers may touch: one object, put together by `app.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from batching import BatchingManager, Inference
from config import Config
from stats import ServerStats


class Tokenizer(Protocol):
    vocab_size: int
    longest_token: int
    eot_id: int

    def encode(self, text: str, end_of_text: Any = "text") -> list[int]: ...
    def decode(self, tokens: list[int]) -> str: ...
    def token_bytes(self, token: int) -> bytes: ...


@dataclass(frozen=True)
class Engine:
    """A model that is loaded and a loop that runs."""

    manager: BatchingManager
    tokenizer: Tokenizer
    make_inference: Callable[..., Inference]
    model_name: str
    policy: str
    device: str
    dtype: str
    context: int
    page_size: int
    vocabulary: int = 0  # ids that the model has; 0: as many as the tokenizer
    special_end: bool = True  # <|endoftext|> in a prompt is that token, but on /inference
    facts: dict[str, Any] = field(default_factory=dict)
    loaded_at: float = field(default_factory=time.time)

    @property
    def served_name(self) -> str:
        """The name that requests use for the model."""
        return self.model_name.removesuffix(" (random weights)")


STALL_SECONDS = 300.0  # a loop that has not turned for so long hangs: no step takes that long


@dataclass
class Service:
    """The state of the server: `engine` is None while it loads, `failure` says why it never will."""

    config: Config
    stats: ServerStats = field(default_factory=ServerStats)
    engine: Engine | None = None
    failure: str | None = None

    def status(self) -> tuple[str, str | None]:
        """Return ok, loading, stalled or dead, and why."""
        if self.failure is not None:
            return "dead", self.failure
        if self.engine is None:
            return "loading", "the model is being loaded"
        if not self.engine.manager.is_alive:
            return "dead", "the batching loop has ended"
        age = self.beat_age()
        if age is not None and age > STALL_SECONDS:
            return "stalled", f"the batching loop has not turned for {age:.0f} s"
        return "ok", None

    def beat_age(self) -> float | None:
        """Return the seconds since the loop last turned, None while there is none."""
        return None if self.engine is None else time.perf_counter() - self.engine.manager.beat
