"""Prompts of real text, cut to a length in tokens that is about right for any tokenizer.

The client has no tokenizer, so lengths are set by characters: Shakespeare's plays have about 3.2 of
them in a token of GPT-2 and of bard. The server's own count is in the result, where it tells.
`shakespeare.txt` is an excerpt of the plays ("tiny shakespeare"), in the public domain.
"""

from pathlib import Path

import numpy as np

FILE = Path(__file__).resolve().with_name("shakespeare.txt")
CONTEXT = 1024
CHARACTERS_PER_TOKEN = 3.2
# The densest stretch of the plays has 2.4; prompts are cut so that even there all fits the context.
FEWEST_CHARACTERS = 2.3


class Corpus:
    """A text from which prompts are cut."""

    def __init__(self, text: str) -> None:
        text = "\n".join(line.rstrip() for line in text.splitlines()).strip() + "\n"
        starts = [i for i in range(1, len(text)) if text[i - 1].isspace() and text[i].isalpha()]
        if len(starts) < 100:
            raise ValueError(
                f"the text has only {len(starts)} words, which is too few for prompts. Use a longer --text file"
            )
        self._text = text
        self._starts = np.array(starts)

    def piece(self, rng: np.random.Generator, tokens: int) -> str:
        """Cut about `tokens` tokens of text at a random word."""
        return self.at(int(rng.integers(len(self._starts))), tokens)

    def at(self, word: int, tokens: int) -> str:
        """Cut about `tokens` tokens of text from a word on; past its end the text begins again."""
        start = int(self._starts[word % len(self._starts)])
        length = max(1, round(tokens * CHARACTERS_PER_TOKEN))
        text = self._text[start : start + length]
        while len(text) < length:
            text += self._text[: length - len(text)]
        # A server may refuse a prompt of blanks, and a blank at the end is a token of its own kind.
        return text.rstrip() or text[:1]


def load(path: Path | None = None) -> Corpus:
    """Read a text file, or the plays; ValueError when it cannot be read or is too short."""
    try:
        return Corpus((path or FILE).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ValueError(f"cannot read {str(path or FILE.name)!r}: {reason}. Use a plain UTF-8 --text file") from error


def fitted(prompt: str, num_tokens: int) -> str:
    """Shorten a prompt until it fits the context beside its answer, whatever the tokenizer."""
    return prompt[: max(1, int((CONTEXT - num_tokens) * FEWEST_CHARACTERS))].rstrip() or prompt[:1]
