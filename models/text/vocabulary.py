"""What a source of a tokenizer provides: how ordinary text becomes ids, the bytes of each id, and the special ids.

It must not know where a vocabulary comes from.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile

import tiktoken

from models.text import ranks
from models.text.ranks import EOT
from models.text.splits import Split

LONG_RUN = 64  # combining marks in a row; no language has as many
# The only characters that are no combining marks but become some, by their canonical decomposition.
SPLIT_MARKS = {"\u0f73": "\u0f71\u0f72", "\u0f75": "\u0f71\u0f74", "\u0f81": "\u0f71\u0f80"}
MOST_IDS = 1 << 21  # ten times the largest vocabulary that is published


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer's tokens.

    `encode` takes ordinary text, in which a control token's text has no effect; `encode_rest` does the same for text
    that does not begin a prompt. `pieces` are the bytes of each id. `control` are the tokens that only the server and
    chat templates may use; one in `strips_left` or `strips_right` takes the white space beside it along. `bos_ids`
    begin a prompt, `eos_ids` end an answer. With `leading_space` the first token of a text begins with a space that is
    not in the text. `template` is the source of the chat template, and `names` what it knows of the tokenizer.
    """

    encode: Callable[[str], list[int]]
    pieces: Sequence[bytes]
    control: Mapping[str, int]
    eos_ids: tuple[int, ...]
    bos_ids: tuple[int, ...] = ()
    encode_rest: Callable[[str], list[int]] | None = None
    strips_left: frozenset[str] = frozenset()
    strips_right: frozenset[str] = frozenset()
    leading_space: bool = False
    template: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)


def of_ranks(encoding: tiktoken.Encoding) -> Vocabulary:
    """Return GPT-2's vocabulary, or one like it: `<|endoftext|>` ends a text, and there is no chat template."""
    pieces = [b""] * encoding.n_vocab
    for token in encoding.token_byte_values():
        pieces[encoding.encode_single_token(token)] = token
    control = {text: encoding.encode_single_token(text) for text in encoding.special_tokens_set}
    for text, id in control.items():
        pieces[id] = text.encode()
    return Vocabulary(encoding.encode_ordinary, pieces, control, (control[EOT],))


def byte_level(
    source: str,
    vocab: Mapping[str, int],
    merges: Iterable[ranks.Pair],
    split: Split,
    control: Mapping[str, int],
    added: Mapping[str, int],
) -> tuple[Callable[[str], list[int]], list[bytes]]:
    """Return `encode` and `pieces` of a byte-level BPE; `added` tokens are found in ordinary text too.

    An added token without text has an id, but is found nowhere: tiktoken would find it without end.

    Raises TokenizerError, and its OutOfOrder where tiktoken would merge in another order.
    """
    everything = {**vocab, **control, **added}
    check_ids(source, everything)
    in_text = {text: token for text, token in added.items() if text}
    size = 1 + max(everything.values())
    encoding = ranks.from_merges(source, vocab, merges, split, in_text, size)
    has_all_bytes = encoding.max_token_value < size
    pieces = [b""] * size
    for text, token in everything.items():
        raw = text in control or text in added or any(character not in ranks.ALPHABET for character in text)
        pieces[token] = text.encode() if raw else bytes(ranks.ALPHABET[character] for character in text)

    def encode(text: str) -> list[int]:
        if split.nfc:
            text = nfc(text)
        ids = encoding.encode(text, allowed_special="all") if in_text else encoding.encode_ordinary(text)
        return ids if has_all_bytes else [token for token in ids if token < size]

    return encode, pieces


def nfc(text: str) -> str:
    """Return the text in Unicode's normalization form C, in a time that grows with its length.

    CPython sorts the combining marks behind a character by insertion, which takes minutes for the marks of one request
    and keeps the interpreter. Marks that are in order cost it nothing, so long runs are put in order first.
    """
    if text.isascii():
        return text
    for mark, parts in SPLIT_MARKS.items():
        text = text.replace(mark, parts)
    pieces, done = [], 0
    for i in range(0, len(text), LONG_RUN):  # no longer run lies between two of these
        if i < done or not unicodedata.combining(text[i]):
            continue
        start = end = i
        while start > done and unicodedata.combining(text[start - 1]):
            start -= 1
        while end < len(text) and unicodedata.combining(text[end]):
            end += 1
        pieces += [text[done:start], "".join(sorted(text[start:end], key=unicodedata.combining))]
        done = end
    return unicodedata.normalize("NFC", "".join([*pieces, text[done:]]) if pieces else text)


def text_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern that finds any of `texts`, the longest one first; without texts it finds nothing."""
    ordered = sorted({text for text in texts if text})
    try:
        return re.compile(_any_of(ordered) if ordered else r"(?!)")
    except RecursionError:  # each text begins the next: there are too few of them to matter
        return re.compile("|".join(map(re.escape, sorted(ordered, key=len, reverse=True))))


def _any_of(texts: list[str]) -> str:
    """Return a pattern of sorted texts in which their common beginnings are compared once, not once for each text."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(texts[0], texts[-1]))
    common = "".join(character for character, _ in same)
    rests = [text[len(common) :] for text in texts]
    branches = [_any_of([*group]) for _, group in groupby(filter(None, rests), key=lambda rest: rest[0])]
    if not branches:
        return re.escape(common)
    return f"{re.escape(common)}(?:{'|'.join(branches)}){'?' if not rests[0] else ''}"


def check_ids(source: str, vocab: Mapping[str, int]) -> None:
    """Raise TokenizerError unless each token has an id of its own."""
    ids = list(vocab.values())
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ranks.inconsistent(source, "an id in the vocabulary is not a whole number of at least 0")
    if len(set(ids)) != len(ids):
        raise ranks.inconsistent(source, "two tokens have the same id")
    if not ids or max(ids) >= MOST_IDS:
        raise ranks.inconsistent(source, f"its ids are not between 0 and {MOST_IDS - 1:,}")
