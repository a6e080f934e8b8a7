"""Text to token ids and back, with tiktoken's encoder; also for text that comes in pieces.

Ids become bytes, and bytes become text. The border between two tokens may cut a character, so a stream of tokens goes
through a `Detokenizer`. It must not know HTTP or batching.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import tiktoken

from models import ranks
from models.catalog import BARD, ResolvedModel
from models.ranks import TokenizerError

EOT = ranks.EOT
LONGEST_RUN = 400_000  # characters of white space in a row; from some 700,000 on tiktoken's stack overflows


class TextError(ValueError):
    """A text cannot be tokenized."""


class Tokenizer:
    """Encode text and decode ids with a tiktoken Encoding.

    Ids that the encoding does not know decode to nothing (a model's vocabulary may be padded), or, with `fold` (random
    weights with a smaller model's tokenizer), as the id modulo the size of the vocabulary.
    """

    def __init__(self, encoding: tiktoken.Encoding, fold: bool = False, warning: str | None = None) -> None:
        self.encoding = encoding
        self.fold = fold
        self.warning = warning
        self.vocab_size = encoding.n_vocab
        self.eot_id = encoding.encode_single_token(EOT)
        self._bytes = [b""] * self.vocab_size
        for token in encoding.token_byte_values():
            self._bytes[encoding.encode_single_token(token)] = token
        for text in encoding.special_tokens_set:
            self._bytes[encoding.encode_single_token(text)] = text.encode()
        self.longest_token = max(map(len, self._bytes))

    def encode(self, text: str, end_of_text: Literal["text", "special"] = "text") -> list[int]:
        """Return the ids of `text`; `<|endoftext|>` in it is ordinary text or the special token.

        Raises TextError for a text that the encoder cannot handle.
        """
        _refuse_long_runs(text)
        try:
            if end_of_text == "special":
                return self.encoding.encode(text, allowed_special={EOT}, disallowed_special=())
            return self.encoding.encode_ordinary(text)
        except BaseException as error:
            # A panic of the encoder is a BaseException, and would end a thread without an answer.
            if type(error).__name__ != "PanicException" and not isinstance(error, ValueError):
                raise
            raise TextError(
                f"the text of {len(text):,} characters cannot be tokenized. Shorten its longest run"
            ) from error

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the ids of `text` without special tokens; tiktoken's own name."""
        return self.encode(text)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one id."""
        if 0 <= token < self.vocab_size:
            return self._bytes[token]
        if token < 0:
            raise TextError(f"token id {token} is negative. Use ids of at least 0")
        return self._bytes[token % self.vocab_size] if self.fold else b""

    def whole_texts(self) -> list[int]:
        """Return the ids of printable ASCII text, between which no character is cut."""
        return [
            i
            for i, text in enumerate(self._bytes)
            if text.isascii() and text.decode().isprintable() and i != self.eot_id
        ]

    def decode_bytes(self, tokens: Iterable[int]) -> bytes:
        """Return the bytes of `tokens`."""
        return b"".join(map(self.token_bytes, tokens))

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(tokens).decode("utf-8", errors="replace")


class Detokenizer:
    """Turn a stream of token ids into text without ever returning half a character.

    All pieces, with the one from `finish`, join to `Tokenizer.decode` of all ids.
    """

    __slots__ = ("_decoder", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, tokens: Iterable[int]) -> str:
        """Return the text that became certain with `tokens`; it may be empty."""
        return self._decoder.decode(self._tokenizer.decode_bytes(tokens))

    @property
    def is_halfway(self) -> bool:
        """Whether the last character is incomplete."""
        return bool(self._decoder.getstate()[0])

    def finish(self) -> str:
        """Return the rest: nothing, or U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", final=True)


def load_tokenizer(resolved: ResolvedModel, file: str | Path | None = None) -> Tokenizer:
    """Return the tokenizer of `resolved`: its folder's own, else GPT-2's from `file` or tiktoken's cache.

    `file` is a rank file (EB_TOKENIZER_FILE). If there are no ranks for random weights, return bard's tokenizer with a
    `warning`. Raises TokenizerError.
    """
    if resolved.tokenizer is not None:
        return _fitting(Tokenizer(ranks.from_folder(resolved.tokenizer)), resolved)
    if file:
        return _fitting(Tokenizer(ranks.from_file(Path(file))), resolved)
    try:
        return _fitting(Tokenizer(ranks.from_tiktoken()), resolved)
    except TokenizerError as error:
        if resolved.load_format != "dummy" or not (BARD / "vocab.json").is_file():
            raise
        warning = (
            f"{error}. Until then bard's tokenizer is used, which changes lengths in tokens; the text is random anyway"
        )
        return _fitting(Tokenizer(ranks.from_folder(BARD), fold=True, warning=warning), resolved)


def load_stand_in(file: str | Path | None = None, timeout_s: float = 3.0) -> Tokenizer:
    """Return a tokenizer for a model without weights: GPT-2's from `file` or tiktoken, else one of bytes.

    A text has about four times as many bytes as tokens, so the tokenizer of bytes has a `warning`. Raises TokenizerError
    for a bad file.
    """
    if file:
        return Tokenizer(ranks.from_file(Path(file)))
    try:
        return Tokenizer(ranks.from_tiktoken(timeout_s))
    except TokenizerError as error:
        return Tokenizer(ranks.of_bytes(), warning=f"{error}. Until then each byte is a token")


def _fitting(tokenizer: Tokenizer, resolved: ResolvedModel) -> Tokenizer:
    """Return `tokenizer`, or raise TokenizerError if it has ids that the model does not have."""
    vocabulary = resolved.config["vocab_size"]
    if tokenizer.vocab_size > vocabulary:
        raise TokenizerError(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, but model {resolved.name} has only "
            f"{vocabulary:,}. Use a model folder with its own vocab.json and merges.txt, "
            "or set EB_TOKENIZER_FILE to a rank file that fits"
        )
    return tokenizer


def _refuse_long_runs(text: str) -> None:
    if len(text) <= LONGEST_RUN:
        return
    for run in re.finditer(r"\s+", text):
        if run.end() - run.start() > LONGEST_RUN:
            raise TextError(
                f"the text has {run.end() - run.start():,} characters of white space in one run, "
                f"but at most {LONGEST_RUN:,} can be tokenized. Shorten the run"
            )
