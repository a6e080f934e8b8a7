"""How much longer a tokenizer of the `tokenizers` library can make a text before it looks up tokens.

The library ends the process when it gets no memory, so a tokenizer.json whose steps multiply a text is refused when it is
loaded, and a text is refused before its normalized form could be too long. It must not import the library.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from models.text.ranks import TokenizerError

MOST_GROWTH = 256  # bytes for each byte of a text: NFKC (11), SentencePiece's spaces (4) and byte-level (2) make 88
MOST_BYTES = 16 << 20  # of a text with all that is added to it; the library needs up to 100 times as many
# The most bytes that a step makes of one (UAX #15 has those of the normalization forms).
PLAIN = {
    "BertNormalizer": 8, "Strip": 1, "StripAccents": 1, "NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 2, "Nmt": 1,
    "BertPreTokenizer": 1, "CharDelimiterSplit": 1, "Whitespace": 1, "WhitespaceSplit": 1, "Punctuation": 1, "Split": 1,
    "Digits": 1, "UnicodeScripts": 1, "FixedLength": 1,
}  # fmt: skip
Step = Mapping[str, Any]


def growth_of(content: Mapping[str, Any], source: str) -> float:
    """Return how many bytes at most a tokenizer.json makes of each byte of a text.

    Raises TokenizerError, naming the step at which it is above MOST_GROWTH, and for a step that is not known.
    """
    total = 1.0
    for part, name in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        for step in plain_steps(content.get(part), name):
            kind = step.get("type")
            factor = _growth(step)
            if factor is None:
                raise TokenizerError(
                    f"{part} of {source} has the step {str(kind)[:60]!r}, which is not supported. Use a model without it"
                )
            total *= factor
            if total > MOST_GROWTH:
                raise TokenizerError(
                    f"{part} of {source} can make {total:,.0f} bytes of one with its step {kind}, but at most {MOST_GROWTH} "
                    "are allowed. Use the tokenizer.json that belongs to the model"
                )
    return total


def plain_steps(step: Step | None, name: str) -> list[Step]:
    """Return a step, or the steps of a sequence, however deep."""
    found, rest = [], [step] if step else []
    while rest:
        step = rest.pop(0)
        if step.get("type") == "Sequence":
            rest = [*step[name], *rest]
        else:
            found.append(step)
    return found


def _growth(step: Step) -> float | None:
    match step.get("type"):
        case "Replace":
            made = len(step["content"].encode())
            found = len(step["pattern"].get("String", "").encode())
            # A regular expression may match nothing, between any two characters.
            return max(1.0, made / found) if found else 1.0 + made
        case "Prepend":  # to each part of a text between two added tokens
            return 1.0 + len(step["prepend"].encode())
        case "Precompiled":
            return float(max(1, _longest(step["precompiled_charsmap"])))
        case "Metaspace":
            return 1.0 + len(step["replacement"].encode())
        case "ByteLevel":
            return 4.0 if step.get("add_prefix_space") else 2.0
        case kind:
            return PLAIN.get(str(kind))


def _longest(charsmap: str) -> int:
    """Return the length of the longest text in SentencePiece's map of characters, which follow its trie."""
    try:
        raw = base64.b64decode(charsmap or "")
    except binascii.Error as error:
        raise ValueError("precompiled_charsmap is not base64") from error
    return max(map(len, raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")))
