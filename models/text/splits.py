"""How byte-level BPE tokenizers split a text before they merge: the known patterns, and where each is named.

Each pattern gives the same pieces as its original, but in a form with which tiktoken does not backtrack for long. It
must not know vocabularies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Split:
    """A pattern for tiktoken. With `nfc` the text is normalized first; `originals` are the patterns it replaces."""

    name: str
    pattern: str
    originals: tuple[str, ...] = ()
    nfc: bool = False


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QUICK_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}++"
_QUICK_REST = r" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s*[\r\n]|\s++$|\s+(?!\S)|\s"

GPT2 = Split("gpt2", r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""")
# Digits are split off before GPT-2's pattern sees the rest, so white space before a digit is the end of its part.
SMOLLM = Split(
    "smollm", r"""\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?[^\s\p{L}\p{N}]++|\s++(?=\p{N})|\s++$|\s+(?!\S)|\s"""
)
LLAMA3 = Split(
    "llama-bpe", rf"{_QUICK_WORDS}|\p{{N}}{{1,3}}+|{_QUICK_REST}", (rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",)
)  # fmt: skip
QWEN2 = Split("qwen2", rf"{_QUICK_WORDS}|\p{{N}}|{_QUICK_REST}", (rf"{_WORDS}|\p{{N}}|{_REST}",), nfc=True)

# tokenizer.ggml.pre in GGUF files
GGUF = {
    "gpt-2": GPT2,
    "olmo": GPT2,
    "phi-2": GPT2,
    "refact": SMOLLM,  # Granite's
    "smollm": SMOLLM,
    "starcoder": SMOLLM,
    "dbrx": LLAMA3,
    "llama-bpe": LLAMA3,
    "smaug-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
}
# tokenizer_class in a tokenizer_config.json beside vocab.json and merges.txt
CLASSES = {"GPT2Tokenizer": GPT2, "GPT2TokenizerFast": GPT2, "Qwen2Tokenizer": QWEN2, "Qwen2TokenizerFast": QWEN2}


def of_fast_tokenizer(content: Mapping[str, Any]) -> Split | None:
    """Return the split of a tokenizer.json that is byte-level BPE with a known pattern, otherwise None."""
    model = content["model"]
    if (
        model["type"] != "BPE"
        or any(model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
        or model.get("byte_fallback")
        or (content.get("decoder") or {}).get("type") != "ByteLevel"
    ):
        return None
    normalizer = content.get("normalizer")
    nfc = normalizer is not None and normalizer.get("type") == "NFC"
    found = _known_steps(content.get("pre_tokenizer") or {})
    if found is None or (normalizer is not None and not nfc):
        return None
    return Split(found.name, found.pattern, found.originals, nfc)


def _known_steps(step: Mapping[str, Any]) -> Split | None:
    steps = step["pretokenizers"] if step.get("type") == "Sequence" else [step]
    *before, last = steps
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if last.get("use_regex", True):
        if not before:
            return GPT2
        digits = len(before) == 1 and before[0].get("type") == "Digits" and before[0].get("individual_digits")
        return SMOLLM if digits else None
    if len(before) != 1 or before[0].get("type") != "Split":
        return None
    split = before[0]
    if split.get("behavior") != "Isolated" or split.get("invert"):
        return None
    pattern = split["pattern"].get("Regex")
    return next((known for known in (LLAMA3, QWEN2) if pattern in known.originals), None)
