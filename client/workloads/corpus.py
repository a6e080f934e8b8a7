"""Prompts of text, cut to a length in tokens.

The client has no tokenizer. `plays.txt` therefore holds only words of Shakespeare's plays that are one token each, for
GPT-2's tokenizer and for bard's: as many words are as many tokens. dev/tools/cut_plays.py makes it. The length of any other
text (--text, the prompts of a trace) is an estimate; the server's own count is in the result.
"""

import math
import re
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

FILE = Path(__file__).resolve().with_name("plays.txt")
# Of a server that does not report its own, and of the simulator: most models hold at least as much.
USUAL_CONTEXT = 1024
CHARACTERS_PER_TOKEN = 3.2
# The densest stretch of the plays has 2.4; text of estimated length is cut so that even there all fits the context.
FEWEST_CHARACTERS = 2.3


class Corpus:
    """A text from which prompts are cut.

    `words` end with the white space behind them. Prompts begin at one of the places in `starts`.
    """

    def __init__(self, words: Sequence[str], starts: Sequence[int], tokens_per_word: float = 1.0) -> None:
        self._words = words
        self._starts = starts
        self._tokens_per_word = tokens_per_word

    def piece(self, rng: np.random.Generator, tokens: int) -> str:
        """Cut `tokens` tokens of text at a random place."""
        return self.at(int(rng.integers(len(self._starts))), tokens)

    def at(self, place: int, tokens: int) -> str:
        """Cut `tokens` tokens of text from a place on; after its end the text begins again."""
        start = self._starts[place % len(self._starts)]
        count = max(1, round(tokens / self._tokens_per_word))
        words = list(self._words[start : start + count])
        while len(words) < count:
            words += self._words[: count - len(words)]
        # A blank at the end would be a token of its own.
        return "".join(words).rstrip()


@cache
def plays() -> Corpus:
    """Read the plays. A line begins with a word that is one token without a space before it, too."""
    words: list[str] = []
    starts: list[int] = []
    for line in FILE.read_text("utf-8").splitlines():
        starts.append(len(words))
        words += [f"{word} " for word in line.split()]
    return Corpus(words, starts)


@cache
def _words_of_the_plays() -> frozenset[str]:
    return frozenset(FILE.read_text("utf-8").split())


def load(path: Path | None = None) -> Corpus:
    """Read a text file, or the plays; ValueError when it cannot be read or is too short."""
    if path is None:
        return plays()
    try:
        words = re.findall(r"\S+\s*", path.read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ValueError(f"cannot read {str(path)!r}: {reason}. Use a plain UTF-8 --text file") from error
    starts = [i for i, word in enumerate(words) if word[0].isalpha()]
    if len(starts) < 100:
        raise ValueError(
            f"the text has only {len(starts)} words, which is too few for prompts. Use a longer --text file"
        )
    return Corpus(words, starts, sum(map(len, words)) / len(words) / CHARACTERS_PER_TOKEN)


def is_exact(text: str) -> bool:
    """Whether the text has as many tokens as words."""
    return _words_of_the_plays().issuperset(text.split(" "))


def split(text: str) -> list[str]:
    """Cut a text into its estimated tokens, so that equal beginnings of two texts are cut alike."""
    if is_exact(text):
        return text.split(" ")
    ends = [round(CHARACTERS_PER_TOKEN * i) for i in range(max(1, round(len(text) / CHARACTERS_PER_TOKEN)) + 1)]
    return [text[a:b] for a, b in pairwise(ends)]


def fitted(prompt: str, num_tokens: int, context: int) -> tuple[str, int]:
    """Return a prompt and the length of its answer, cut where they do not fit the context together.

    An answer may have half of the context, and what a shorter prompt leaves of it. A text of unknown length is counted
    as the densest one.
    """
    exact = is_exact(prompt)
    tokens = len(prompt.split(" ")) if exact else math.ceil(len(prompt) / FEWEST_CHARACTERS)
    if tokens + num_tokens <= context:
        return prompt, num_tokens
    num_tokens = min(num_tokens, max(context // 2, context - tokens))
    room = context - num_tokens
    if exact:
        return " ".join(prompt.split(" ")[:room]), num_tokens
    return prompt[: max(1, int(room * FEWEST_CHARACTERS))].rstrip() or prompt[:1], num_tokens
