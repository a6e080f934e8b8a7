"""The blocks of text that the prompts of a trace begin with, where the trace names them instead of its texts.

The number of a block stands for its tokens and all before it, as in Mooncake's and Qwen's traces. This module must not know
what a trace file looks like, or which pages hold a block.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

import numpy as np

TOKENS = 512  # of a block of Mooncake's trace


@dataclass(frozen=True)
class Blocks:
    """The blocks of each request, numbered from 0."""

    prompts: list[np.ndarray]
    count: int  # the number of different blocks
    size: int = TOKENS  # of a block

    @classmethod
    def of(cls, prompts: Iterable[Iterable[Hashable]], size: int = TOKENS) -> Blocks:
        """Number the blocks of the prompts of a trace, each of `size` tokens."""
        numbers: dict[Hashable, int] = {}
        numbered = [np.array([numbers.setdefault(b, len(numbers)) for b in p], dtype=np.int64) for p in prompts]
        return cls(numbered, len(numbers), size)

    def only(self, chosen: np.ndarray) -> Blocks:
        """Return the blocks of the requests with these indices."""
        return replace(self, prompts=[self.prompts[i] for i in chosen])

    @property
    def are_shared(self) -> bool:
        """Whether two requests begin with the same block."""
        heads = [prompt[0] for prompt in self.prompts if len(prompt)]
        return len(set(heads)) < len(heads)

    def keys(self, i: int, tokens: int) -> list[bytes]:
        """Return a key for each full block of a prompt; behind the named blocks, keys that no other request has."""
        packed = self.prompts[i][: tokens // self.size].tobytes()
        keys = [packed[at : at + 8] for at in range(0, len(packed), 8)]
        return keys + [b"%d %d" % (i, block) for block in range(len(keys), tokens // self.size)]

    def tokens(self, i: int, tokens: int) -> list[int]:
        """Return a prompt whose tokens are equal where blocks are; behind the blocks, tokens that no other request has."""
        head = np.repeat(self.prompts[i], self.size)[:tokens]
        return [*head.tolist(), *[self.count + i] * (tokens - len(head))]
