"""Text to token ids and back; also for text that comes in pieces.

Ids become bytes, and bytes become text. The border between two tokens may cut a character, so a stream of tokens goes
through a `Detokenizer`. It must not know HTTP or batching.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from models.sources.resolved import BARD, ResolvedModel
from models.text import ranks
from models.text.ranks import EOT, TokenizerError
from models.text.tokenizer_files import from_folder
from models.text.tool_format import format_of
from models.text.vocabulary import Vocabulary, of_ranks, text_pattern

if TYPE_CHECKING:
    from models.text.chat_template import ChatTemplate, Message

LONGEST_TOKEN = 1 << 14  # bytes, of which each step could write one per request
LONGEST_RUN = 400_000  # characters of white space in a row; from some 700,000 on tiktoken's stack overflows


class TextError(ValueError):
    """A text cannot be tokenized."""


class Tokenizer:
    """Encode text and decode ids with a vocabulary.

    `eos_ids` end an answer, `bos_ids` begin a prompt, and `special_ids` are those of control tokens, which text never
    becomes by itself. Ids that the vocabulary does not have decode to nothing (a model's vocabulary may be padded), or,
    with `fold` (random weights with a smaller model's tokenizer), as the id modulo the size of the vocabulary.
    """

    def __init__(self, vocabulary: Vocabulary, fold: bool = False, warning: str | None = None) -> None:
        self.vocabulary = vocabulary
        self.fold = fold
        self.warning = warning
        self.vocab_size = len(vocabulary.pieces)
        self.eos_ids = vocabulary.eos_ids
        self.bos_ids = vocabulary.bos_ids
        self.special_ids = frozenset(vocabulary.control.values()) | {*vocabulary.eos_ids}
        self.chat_template = _chat_template(vocabulary)
        known = self.chat_template
        reads = () if known is None else known.variables
        self.tool_format = format_of(
            vocabulary.template, reads, vocabulary.control, known is None or known.takes_system
        )
        self._bytes = vocabulary.pieces
        self._calls: dict[object, None] = {}  # in progress, the oldest first
        self.longest_token = max(map(len, self._bytes))
        if self.longest_token > LONGEST_TOKEN:
            raise TokenizerError(
                f"the tokenizer has a token of {self.longest_token:,} bytes, but at most {LONGEST_TOKEN:,} are allowed. "
                "Use the tokenizer files that belong to the model"
            )

    @property
    def oldest_call(self) -> object | None:
        """What identifies the oldest call in progress, None if there is none; any thread may ask."""
        return next(iter(list(self._calls)), None)

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Count a block as a call in progress."""
        call = object()
        self._calls[call] = None
        try:
            yield
        finally:
            del self._calls[call]

    def encode(self, text: str, end_of_text: Literal["text", "special"] = "text") -> list[int]:
        """Return the ids of `text`; `<|endoftext|>` in it is ordinary text or the special token.

        All other control tokens in it are ordinary text. Raises TextError for a text that the encoder cannot handle.
        """
        _refuse_long_runs(text)
        with self._call():
            if end_of_text == "special" and EOT in self.vocabulary.control and EOT in text:
                return self._encode_parts(text, re.compile(re.escape(EOT)), {})
            return self._encode(text, is_first=True)

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the ids of `text` without special tokens; tiktoken's own name."""
        return self.encode(text)

    def encode_rendered(self, text: str, quoted: Mapping[str, str]) -> list[int]:
        """Return the ids of a rendered chat template, in which control tokens are special.

        `quoted` maps marks in `text` to the ordinary text that they stand for, which is never special.
        """
        _refuse_long_runs(text)
        return self._encode_parts(text, self._control, quoted)

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        continues: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        """Return text and ids of a conversation's prompt by the model's chat template, which must exist.

        See `ChatTemplate.render`. Raises TemplateError where the template refuses the conversation, and TextError.
        """
        assert self.chat_template is not None
        with self._call():
            rendered = self.chat_template.render(
                messages, add_generation_prompt, continues=continues, variables=variables
            )
            return rendered.plain(), self.encode_rendered(rendered.text, rendered.quoted)

    @cached_property
    def _control(self) -> re.Pattern[str]:
        return text_pattern(self.vocabulary.control)

    def _encode_parts(self, text: str, control: re.Pattern[str], quoted: Mapping[str, str]) -> list[int]:
        """Return the ids of `text`, in which what `control` matches are control tokens."""
        v = self.vocabulary
        marks = text_pattern(quoted)
        ids: list[int] = []
        start, before = 0, ""
        for match in [*control.finditer(text), None]:
            token = match.group() if match else ""
            part = text[start : match.start() if match else len(text)]
            part = part.lstrip() if before in v.strips_right else part
            part = part.rstrip() if token in v.strips_left else part
            if part:
                ids += self._encode(marks.sub(lambda mark: quoted[mark.group()], part), is_first=start == 0)
            if match:
                ids.append(v.control[token])
                start, before = match.end(), token
        return ids

    def _encode(self, text: str, is_first: bool) -> list[int]:
        encode = self.vocabulary.encode if is_first else self.vocabulary.encode_rest or self.vocabulary.encode
        try:
            return encode(text)
        except BaseException as error:
            # A panic of the encoder is a BaseException, and would end a thread without an answer.
            if type(error).__name__ != "PanicException" and not isinstance(error, ValueError):
                raise
            raise TextError(
                f"the text of {len(text):,} characters cannot be tokenized. Shorten its longest run"
            ) from error

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
            if text.isascii() and text.decode().isprintable() and i not in self.special_ids
        ]

    def decode_bytes(self, tokens: Iterable[int]) -> bytes:
        """Return the bytes of `tokens`."""
        pieces, size = self._bytes, self.vocab_size
        return b"".join([pieces[token] if 0 <= token < size else self.token_bytes(token) for token in tokens])

    def decode(self, tokens: Iterable[int], *, begins: bool = False) -> str:
        """Return the text that `tokens` add to a text before them; bytes that are not UTF-8 become U+FFFD.

        With `begins` there is no text before them, so that SentencePiece's first space is left out.
        """
        text = self.decode_bytes(tokens).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if begins and self.vocabulary.leading_space else text


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
    """Return the tokenizer of `resolved`: its folder's or GGUF file's own, else GPT-2's from `file` or tiktoken's cache.

    `file` is a rank file (EB_TOKENIZER_FILE). If there are no ranks for random weights, return bard's tokenizer with a
    `warning`. Raises TokenizerError.
    """
    if resolved.tokenizer is not None:
        return _fitting(Tokenizer(_own(resolved.tokenizer)), resolved)
    if file:
        return _fitting(Tokenizer(of_ranks(ranks.from_file(Path(file)))), resolved)
    try:
        return _fitting(Tokenizer(of_ranks(ranks.from_tiktoken())), resolved)
    except TokenizerError as error:
        if resolved.load_format != "dummy" or not (BARD / "vocab.json").is_file():
            raise
        warning = (
            f"{error}. Until then bard's tokenizer is used, which changes lengths in tokens; the text is random anyway"
        )
        return _fitting(Tokenizer(from_folder(BARD), fold=True, warning=warning), resolved)


def load_stand_in(file: str | Path | None = None, timeout_s: float = 3.0, *, downloads: bool = True) -> Tokenizer:
    """Return a tokenizer for a model without weights: GPT-2's from `file` or tiktoken, else bard's.

    Without `downloads`, it is bard's unless there is a `file`; otherwise bard's has a `warning`. Raises TokenizerError for
    a bad file.
    """
    if file:
        return Tokenizer(of_ranks(ranks.from_file(Path(file))))
    if not downloads:
        return Tokenizer(from_folder(BARD), fold=True)
    try:
        return Tokenizer(of_ranks(ranks.from_tiktoken(timeout_s)))
    except TokenizerError as error:
        return Tokenizer(from_folder(BARD), fold=True, warning=f"{error}. Until then bard's tokenizer is used")


def _chat_template(vocabulary: Vocabulary) -> ChatTemplate | None:
    if vocabulary.template is None:
        return None
    from models.text.chat_template import ChatTemplate

    return ChatTemplate(vocabulary.template, vocabulary.names, vocabulary.control)


def _own(source: Path) -> Vocabulary:
    if source.is_dir():
        return from_folder(source)
    from models.gguf import gguf_reader, tokenizer_gguf

    return tokenizer_gguf.from_gguf(gguf_reader.read(source).metadata, source.name)


def _fitting(tokenizer: Tokenizer, resolved: ResolvedModel) -> Tokenizer:
    """Return `tokenizer`, or raise TokenizerError if it has ids that the model does not have."""
    vocabulary = resolved.architecture.vocab_size
    if tokenizer.vocab_size > vocabulary:
        raise TokenizerError(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, but model {resolved.name} has only "
            f"{vocabulary:,}. Put the model's own tokenizer.json into its folder, "
            "or set EB_TOKENIZER_FILE to ranks that fit"
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
