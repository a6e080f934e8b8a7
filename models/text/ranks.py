"""The sources of a tokenizer's ranks: the merges of a model, a rank file, or tiktoken.

tiktoken merges the neighbors whose joined bytes have the lowest rank, and the rank is the token's id. A model lists its
merges in order instead. The two agree if the ids rise along the merges, which is checked.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import os
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import tiktoken

from models.text.splits import GPT2, Split

EOT = "<|endoftext|>"
PATTERN = GPT2.pattern
DOWNLOAD_S = 10.0
Pair = tuple[str, ...]


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded or is not consistent; the message gives the reason and the remedy."""


class OutOfOrder(TokenizerError):
    """tiktoken would apply the merges of a tokenizer in another order."""


def inconsistent(source: str, reason: str) -> TokenizerError:
    """Return the refusal of a tokenizer whose parts contradict each other."""
    return TokenizerError(
        f"the tokenizer in {source} is not consistent: {reason}. Use tokenizer files from the same model"
    )


def _alphabet() -> dict[str, int]:
    """Return GPT-2's byte alphabet: the byte of each of its 256 printable characters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


ALPHABET = _alphabet()


def from_merges(
    source: str, vocab: Mapping[str, int], merges: Iterable[Pair], split: Split, added: Mapping[str, int], spare: int
) -> tiktoken.Encoding:
    """Return the Encoding of a byte-level BPE whose tokens are written in GPT-2's byte alphabet.

    `added` tokens are found in a text before it is split. A byte without a token encodes to an id of `spare` or above,
    where no token may be; the caller removes it. Raises TokenizerError if `vocab` and `merges` contradict each
    other, and OutOfOrder if they agree but tiktoken would merge in another order.
    """
    table: dict[bytes, int] = {}
    for character, byte in ALPHABET.items():
        if character in vocab:
            table[bytes([byte])] = vocab[character]
        elif chr(byte).isprintable() and byte < 128:
            raise inconsistent(source, f"the vocabulary has no token for byte {byte}")
    last, late = -1, ""
    for number, pair in enumerate(merges, 1):
        token = "".join(pair)
        if len(pair) != 2 or any(part not in vocab for part in (*pair, token)):
            raise inconsistent(source, f"merge {number} {' '.join(pair)!r} is not in the vocabulary")
        if vocab[token] < last and not late:  # not at the same id: a token may be merged from several pairs
            late = f"merge {number} {' '.join(pair)!r} comes after one with a higher id"
        last = vocab[token]
        table[bytes(ALPHABET[character] for character in token)] = last
    if late:
        raise OutOfOrder(str(inconsistent(source, late)))
    for byte in range(256):
        table.setdefault(bytes([byte]), spare + byte)
    return tiktoken.Encoding(source, pat_str=split.pattern, mergeable_ranks=table, special_tokens=dict(added))


def from_file(path: Path) -> tiktoken.Encoding:
    """Read a rank file: for each token a line with its bytes in base64, a space, and its rank.

    `<|endoftext|>` gets the id after the last rank. Raises TokenizerError with the number of a bad line.
    """
    remedy = "Set EB_TOKENIZER_FILE to a complete rank file such as gpt2.tiktoken"
    try:
        lines = path.expanduser().read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
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


def from_tiktoken(timeout_s: float = DOWNLOAD_S) -> tiktoken.Encoding:
    """Return GPT-2's ranks from tiktoken, which caches them after one download.

    Raises TokenizerError after `timeout_s` seconds, as tiktoken itself has no timeout; and at once where HF_HUB_OFFLINE
    disables downloads and there is no cache.
    """
    if _is_out_of_reach():
        raise _unavailable("HF_HUB_OFFLINE disables downloads")
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
    raise _unavailable(reason) from outcome


def _is_out_of_reach() -> bool:
    """Return whether tiktoken has no cache and may not download; to try loads an HTTP client in vain."""
    folders = (os.environ.get(name) for name in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"))
    cache = next(filter(None, folders), os.path.join(tempfile.gettempdir(), "data-gym-cache"))
    is_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "TRUE", "YES")
    return is_offline and not os.path.isdir(cache)


def _unavailable(reason: str) -> TokenizerError:
    return TokenizerError(
        f"GPT-2's tokenizer is not in tiktoken's cache and cannot be downloaded ({reason}). "
        "Set EB_TOKENIZER_FILE to a rank file such as gpt2.tiktoken"
    )
