"""Requests whose prompts begin alike, and the least that any server computes for them."""

from __future__ import annotations

import random

from scheduling.pages import PagePool
from scheduling.sequence import Sequence

PAGE = 16
VOCABULARY = 4000  # token ids that every model has


def drawn(count: int, prefixes: int, tokens: int, tail: int = 20, answer: int = 24, seed: int = 1) -> list[Sequence]:
    """Return shuffled requests with `prefixes` beginnings of `tokens` tokens, then 4 to `tail`, answered by 4 to `answer`."""
    rng = random.Random(seed)
    heads = [[rng.randrange(VOCABULARY) for _ in range(tokens)] for _ in range(prefixes)]
    chosen = [heads[i % prefixes] for i in range(count)]
    rng.shuffle(chosen)
    return [
        Sequence(
            [*head, *(rng.randrange(VOCABULARY) for _ in range(rng.randint(4, tail)))], rng.randint(4, answer), id=f"r{i}"
        )
        for i, head in enumerate(chosen)
    ]  # fmt: skip


def least(sequences: list[Sequence], page_size: int = PAGE) -> int:
    """Return the fewest prompt tokens to compute: each distinct page of the trie once, and what is behind the last."""
    pool = PagePool(2, page_size)
    chains = [pool.hashes(seq.prompt_ids) for seq in sequences]
    tails = sum(len(seq.prompt_ids) - page_size * len(chain) for seq, chain in zip(sequences, chains))
    return page_size * len({block for chain in chains for block in chain}) + tails
