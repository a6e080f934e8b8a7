"""Every tokenizer that is not byte-level BPE with a known split, by the `tokenizers` library.

Among them are those of Llama 2, TinyLlama and Mistral: SentencePiece's BPE, in which "▁" stands for a space and a
character without a token becomes the tokens of its bytes. Import it only where one is needed.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from models.text.growth import MOST_BYTES, Step, growth_of, plain_steps
from models.text.ranks import ALPHABET, TokenizerError

SPACE = "▁"
PROBE_SECONDS = 5.0
PROBED_LETTERS, PROBED_LENGTH = 64, 1000
Encode = Callable[[str], list[int]]


def encoders(tokenizer: Tokenizer, source: str) -> tuple[Encode, Encode | None]:
    """Return what encodes ordinary text at the beginning of a prompt, and elsewhere if that differs.

    Control tokens in such a text have no effect; other added tokens do. Raises TokenizerError for a tokenizer that
    multiplies texts, or takes long for short ones.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts come one at a time, and forks would warn
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = None  # it could repeat the ids
    content = {name: _state(getattr(tokenizer, name)) for name in ("normalizer", "pre_tokenizer")}
    growth = growth_of(content, source)
    probe(_encoder(tokenizer, growth), content, source)
    step = tokenizer.pre_tokenizer
    if not isinstance(step, pre_tokenizers.Metaspace) or step.prepend_scheme != "first":
        return _encoder(tokenizer, growth), None
    rest = Tokenizer.from_str(tokenizer.to_str())
    rest.encode_special_tokens = True
    rest.pre_tokenizer = pre_tokenizers.Metaspace(step.replacement, "never", step.split)
    return _encoder(tokenizer, growth), _encoder(rest, growth)


def probe(encode: Encode, content: dict[str, Any], source: str) -> None:
    """Raise TokenizerError unless short texts that make regular expressions backtrack are encoded in time.

    A search that does not end keeps its thread, but not the interpreter.
    """
    parts = json.dumps(content, ensure_ascii=False)
    letters = [*dict.fromkeys("a \n0.é" + "".join(filter(str.isprintable, parts)))][:PROBED_LETTERS]

    def run() -> None:
        for letter in letters:
            try:
                encode(letter * PROBED_LENGTH + "\ue000")
            except BaseException:  # a text may be refused, also by a panic, as long as it is soon
                continue
        done.set()

    done = threading.Event()
    threading.Thread(target=run, name="probe-tokenizer", daemon=True).start()
    if not done.wait(PROBE_SECONDS):
        raise TokenizerError(
            f"the tokenizer in {source} takes more than {PROBE_SECONDS:g} s for {len(letters)} texts of {PROBED_LENGTH} "
            "characters: a regular expression in its normalizer or pre_tokenizer backtracks. Use another model"
        )


def _encoder(tokenizer: Tokenizer, growth: float) -> Encode:
    most = int(MOST_BYTES / growth)

    def encode(text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:  # lone surrogates, as tiktoken replaces them
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if 4 * len(text) > most and len(text.encode()) > most:
            raise ValueError(
                f"the text has {len(text.encode()):,} bytes, at most {most:,} can be normalized. Shorten it"
            )
        # Unlike `encode`, a batch releases the interpreter while it is encoded.
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    return encode


def pieces(tokenizer: Tokenizer, source: str, size: int) -> tuple[list[bytes], bool]:
    """Return the bytes of each id below `size`, and whether the first token of a text has a space that the text lacks.

    Raises TokenizerError for a decoder whose tokens have no bytes of their own.
    """
    raw = {token: str(added) for token, added in tokenizer.get_added_tokens_decoder().items()}
    steps = plain_steps(_state(tokenizer.decoder), "decoders")
    kinds = [step.get("type") for step in steps]
    convert, leading_space = _byte_level, False
    if kinds != ["ByteLevel"]:
        convert = _sentencepiece
        unknown = next((step for step in steps if not _is_known(step)), None)
        if unknown is not None or not ({"Replace", "Metaspace"} & set(kinds)):
            name = "none" if unknown is None else unknown.get("type", "none")
            raise TokenizerError(
                f"the tokenizer in {source} has a decoder that is not supported: {name}. Use a model whose tokenizer is "
                "byte-level BPE or SentencePiece"
            )
        leading_space = any(
            step["type"] == "Strip" or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )
    found = [b""] * size
    for token in range(size):
        text = tokenizer.id_to_token(token)
        if text is not None:
            found[token] = raw[token].encode() if token in raw else convert(text)
    return found, leading_space


def _state(part: Any) -> dict[str, Any]:
    """Return what tokenizer.json says of a part, {} for one that is missing."""
    state: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state


def _is_known(step: Step) -> bool:
    match step.get("type"):
        case "Replace":
            return bool(step["pattern"] == {"String": SPACE} and step["content"] == " ")
        case "Metaspace":
            return bool(step["replacement"] == SPACE)
        case "Strip":
            return bool((step["content"], step["start"], step["stop"]) == (" ", 1, 0))
        case kind:
            return kind in ("ByteFallback", "Fuse")


def _byte_level(text: str) -> bytes:
    if any(character not in ALPHABET for character in text):
        return text.encode()
    return bytes(ALPHABET[character] for character in text)


def _sentencepiece(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            pass
    return text.replace(SPACE, " ").encode()
