"""Make client/workloads/plays.txt: words of the plays that are one token each, for GPT-2's tokenizer and for bard's.

    python dev/tools/cut_plays.py shakespeare.txt gpt2.tiktoken

Words that take more tokens, and punctuation, are left out. Each line begins with a word that is one token without a
space before it, too, so that a prompt may begin there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import dropwhile, islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from models.sources.catalog import BARD
from models.text import ranks
from models.text.tokenizer import Tokenizer
from models.text.tokenizer_files import from_folder

OUT = ROOT / "client" / "workloads" / "plays.txt"
WORDS = 40_000
SHORTEST_LINE = 3


def lines(plays: Path, rank_file: Path) -> Iterator[str]:
    encodings: list[Any] = [ranks.from_file(rank_file), Tokenizer(from_folder(BARD))]

    @cache
    def is_one_token(text: str) -> bool:
        return all(len(encoding.encode_ordinary(text)) == 1 for encoding in encodings)

    def words() -> Iterator[str]:
        for word in re.findall(r"[A-Za-z]+(?:'[a-z]+)?", plays.read_text("utf-8")):
            kept = next((form for form in (word, word.lower()) if is_one_token(f" {form}")), None)
            if kept:
                yield kept

    line: list[str] = []
    for word in islice(dropwhile(lambda word: not is_one_token(word), words()), WORDS):
        if len(line) >= SHORTEST_LINE and is_one_token(word):
            yield " ".join(line)
            line = []
        line.append(word)
    yield " ".join(line)


if __name__ == "__main__":
    OUT.write_text("\n".join(lines(*map(Path, sys.argv[1:]))) + "\n", "utf-8")
