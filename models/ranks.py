"""The sources of a tokenizer's ranks: a model folder, a rank file, or tiktoken.

tiktoken merges the neighbors whose joined bytes have the lowest rank, and the rank is the token's id. A model folder
lists its merges in order instead. The two agree if the ids rise along the merges, which is checked.
"""

from __future__ import annotations

import base64
import binascii
import json
import threading
from pathlib import Path
from typing import Any

import tiktoken

EOT = "<|endoftext|>"
# GPT-2's split, in tiktoken's possessive form: the same pieces, without backtracking.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
DOWNLOAD_S = 10.0
_OTHER = "Use a model with GPT-2's byte-level BPE tokenizer"


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded or is not consistent; the message gives the reason and the remedy."""


def _alphabet() -> dict[str, int]:
    """Return GPT-2's byte alphabet: the byte of each of its 256 printable characters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


def from_folder(folder: Path) -> tiktoken.Encoding:
    """Build a folder's tokenizer from vocab.json and merges.txt, else from tokenizer.json.

    Raises TokenizerError if a file is missing or broken, or if the two contradict each other.
    """
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        vocab = _json(folder / "vocab.json")
        lines = _text(folder / "merges.txt").splitlines()
        if lines and lines[0].startswith("#version"):
            lines = lines[1:]
        merges = [tuple(line.split(" ")) for line in lines if line]
        return _encoding(folder, vocab, merges)
    if (folder / "tokenizer.json").is_file():
        return _encoding(folder, *_fast_tokenizer(folder / "tokenizer.json"))
    raise TokenizerError(
        f"{folder} has neither vocab.json with merges.txt nor tokenizer.json. "
        "Use a folder with the model's tokenizer files"
    )


def _fast_tokenizer(path: Path) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """Return vocabulary and merges of a tokenizer.json that works like GPT-2's."""
    content = _json(path)
    try:
        model, split = content["model"], content["pre_tokenizer"]
        plain = (
            model["type"] == "BPE"
            and split["type"] == "ByteLevel"
            and not split["add_prefix_space"]
            and split.get("use_regex", True)
            and content.get("normalizer") is None
        )
        vocab = dict(model["vocab"])
        vocab |= {added["content"]: added["id"] for added in content.get("added_tokens") or ()}
        merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise TokenizerError(f"{path} is not a GPT-2 tokenizer. {_OTHER}") from error
    if not plain:
        raise TokenizerError(f"{path} does not split text as GPT-2 does. {_OTHER}")
    return vocab, merges


def _encoding(folder: Path, vocab: dict[str, Any], merges: list[tuple[str, ...]]) -> tiktoken.Encoding:
    """Check that `vocab` and `merges` agree, and return their Encoding."""

    def wrong(reason: str) -> TokenizerError:
        return TokenizerError(
            f"the tokenizer in {folder} is not consistent: {reason}. Use vocab.json and merges.txt from the same model"
        )

    ids = list(vocab.values())
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise wrong("an id in the vocabulary is not a whole number of at least 0")
    if len(set(ids)) != len(ids):
        raise wrong("two tokens have the same id")
    if EOT not in vocab:
        raise wrong(f"the vocabulary has no {EOT}")
    alphabet = _alphabet()
    table: dict[bytes, int] = {}
    for character, byte in alphabet.items():
        if character not in vocab:
            raise wrong(f"the vocabulary has no token for byte {byte}")
        table[bytes([byte])] = vocab[character]
    last = -1
    for number, pair in enumerate(merges, 1):
        token = "".join(pair)
        if len(pair) != 2 or any(part not in vocab for part in (*pair, token)):
            raise wrong(f"merge {number} {' '.join(pair)!r} is not in the vocabulary")
        if vocab[token] <= last:
            raise wrong(f"merge {number} {' '.join(pair)!r} comes after one with a higher id")
        last = vocab[token]
        table[bytes(alphabet[character] for character in token)] = last
    # Tokens that no merge makes never come from a text: <|endoftext|>, padding, added tokens.
    mergeable = set(table.values())
    special = {token: i for token, i in vocab.items() if i not in mergeable}
    return tiktoken.Encoding(str(folder), pat_str=PATTERN, mergeable_ranks=table, special_tokens=special)


def from_file(path: Path) -> tiktoken.Encoding:
    """Read a rank file: for each token a line with its bytes in base64, a space, and its rank.

    `<|endoftext|>` gets the id after the last rank. Raises TokenizerError with the number of a bad line.
    """
    remedy = "Set EB_TOKENIZER_FILE to a complete rank file such as gpt2.tiktoken"
    try:
        lines = path.expanduser().read_bytes().splitlines()
    except OSError as error:
        raise TokenizerError(f"cannot read the tokenizer file {path}: {error.strerror or error}. {remedy}") from error
    table: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            table[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise TokenizerError(
                f"line {number} of the tokenizer file {path} is not 'base64 rank': "
                f"{line[:60].decode('ascii', 'replace')!r}. {remedy}"
            ) from error
    for byte in range(256):
        if bytes([byte]) not in table:
            raise TokenizerError(f"the tokenizer file {path} has no byte {byte}. {remedy}")
    if sorted(table.values()) != list(range(len(table))):
        raise TokenizerError(
            f"the ranks in the tokenizer file {path} are not 0 to {len(table) - 1:,}, each once. {remedy}"
        )
    return tiktoken.Encoding(path.stem, pat_str=PATTERN, mergeable_ranks=table, special_tokens={EOT: len(table)})


def of_bytes() -> tiktoken.Encoding:
    """Return a tokenizer that needs no file: each byte is a token, and 256 is `<|endoftext|>`."""
    table = {bytes([byte]): byte for byte in range(256)}
    return tiktoken.Encoding("bytes", pat_str=PATTERN, mergeable_ranks=table, special_tokens={EOT: 256})


def from_tiktoken(timeout_s: float = DOWNLOAD_S) -> tiktoken.Encoding:
    """Return GPT-2's ranks from tiktoken, which caches them after one download.

    Raises TokenizerError after `timeout_s` seconds; tiktoken itself has no timeout.
    """
    result: list[tiktoken.Encoding | Exception] = []

    def fetch() -> None:
        try:
            result.append(tiktoken.get_encoding("gpt2"))
        except Exception as error:  # network, disk, a wrong hash: each is a reason to do without
            result.append(error)

    thread = threading.Thread(target=fetch, name="tiktoken-download", daemon=True)
    thread.start()
    thread.join(timeout_s)
    outcome = result[0] if result else None
    if isinstance(outcome, tiktoken.Encoding):
        return outcome
    reason = f"no answer within {timeout_s:g} s" if outcome is None else type(outcome).__name__
    raise TokenizerError(
        f"GPT-2's tokenizer is not in tiktoken's cache and cannot be downloaded ({reason}). "
        "Set EB_TOKENIZER_FILE to a rank file such as gpt2.tiktoken"
    ) from outcome


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot read {path}: {error}. Use the file that belongs to the model") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{path} is invalid JSON: {error}. Use the file that belongs to the model") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} is not a JSON object. Use the file that belongs to the model")
    return content
