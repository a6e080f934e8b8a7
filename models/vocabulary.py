"""What a source of a tokenizer provides: how ordinary text becomes ids, the bytes of each id, and the special ids.

It must not know where a vocabulary comes from.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import tiktoken

from models import ranks
from models.ranks import EOT, TokenizerError
from models.splits import Split

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

    Raises TokenizerError, and its OutOfOrder where tiktoken would merge in another order.
    """
    everything = {**vocab, **control, **added}
    check_ids(source, everything)
    encoding = ranks.from_merges(source, vocab, merges, split, added)
    size = 1 + max(everything.values())
    has_all_bytes = encoding.max_token_value < size
    pieces = [b""] * size
    for text, token in everything.items():
        raw = text in control or text in added or any(character not in ranks.ALPHABET for character in text)
        pieces[token] = text.encode() if raw else bytes(ranks.ALPHABET[character] for character in text)

    def encode(text: str) -> list[int]:
        if split.nfc:
            text = unicodedata.normalize("NFC", text)
        ids = encoding.encode(text, allowed_special="all") if added else encoding.encode_ordinary(text)
        return ids if has_all_bytes else [token for token in ids if token < size]

    return encode, pieces


def text_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern that finds any of `texts`, the longest one first; without texts it finds nothing."""
    ordered = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


def check_ids(source: str, vocab: Mapping[str, int]) -> None:
    """Raise TokenizerError unless each token has an id of its own."""

    def wrong(reason: str) -> TokenizerError:
        return TokenizerError(
            f"the tokenizer in {source} is not consistent: {reason}. Use tokenizer files from the same model"
        )

    ids = list(vocab.values())
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise wrong("an id in the vocabulary is not a whole number of at least 0")
    if len(set(ids)) != len(ids):
        raise wrong("two tokens have the same id")
    if not ids or max(ids) >= MOST_IDS:
        raise wrong(f"its ids are not between 0 and {MOST_IDS - 1:,}")
