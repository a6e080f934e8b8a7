"""A GGUF file: its header walked within bounds, and its tensors dequantized one at a time.

A file may come from a stranger. Each length is compared with what the file can still hold, and with a limit, before
anything of that length is read, so that a hostile file costs bounded time and memory and ends in a CheckpointError.

It must not know what an architecture's keys and tensors mean, nor import torch.
"""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from models.sources.checkpoint import CheckpointError, broken

Array = npt.NDArray[np.float32]

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 had other lengths and is long gone
ALIGNMENT = 32  # where general.alignment does not say otherwise

# The largest vocabularies of published models need 16 MiB, 1.3 million items and some 2,000 tensors.
MAX_HEADER = 64 * 2**20
MAX_ITEMS = 4 * 2**20
MAX_ENTRIES = 2**16
MAX_DIMENSIONS = 4

# Metadata value types: struct's letter of each number, and the two that are no numbers.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# The fewest bytes of one entry: a string's length, a type, and the value; or a name's length, counts, type, offset.
SMALLEST_KEY, SMALLEST_TENSOR = 13, 24

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")

# How many float16 numbers, scales and minima, begin a block that may be used as it is.
HALVES = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 1}

BLOCKS_CHUNK = 2**22  # bytes read at once
CHUNK = 2**16  # bytes dequantized at once: the temporary copies stay in the cache


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the file: its shape as torch has it (out, in), its kind such as "Q4_0", and its bytes' place."""

    shape: tuple[int, ...]
    kind: str
    start: int
    n_bytes: int


class StoredBlocks(NamedTuple):
    """A matrix as it is in a file: uint8 (out, bytes), rows of blocks of `kind`."""

    kind: str
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file whose header was checked: metadata as plain values, and the tensors, each read on demand."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    def tensor(self, name: str) -> Array:
        """Return tensor `name` in float32, in its shape as torch has it. Raises CheckpointError."""
        stored = self.tensors[name]
        kind = GGMLQuantizationType[stored.kind]
        block_bytes = GGML_QUANT_SIZES[kind][1]
        values: Array = np.empty(math.prod(stored.shape), np.float32)
        done = 0
        for data in self._read(name, CHUNK // block_bytes * block_bytes):
            with np.errstate(all="ignore"):  # a damaged block may hold infinity
                part = dequantize(np.frombuffer(data, np.uint8)[None], kind).ravel()
            values[done : done + len(part)] = part
            done += len(part)
        return values.reshape(stored.shape)

    def blocks(self, name: str) -> StoredBlocks:
        """Return matrix `name`, whose kind has HALVES, as it is. Raises CheckpointError, also for a scale that is no number."""
        stored = self.tensors[name]
        block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[stored.kind]][1]
        data, done = np.empty(stored.n_bytes, np.uint8), 0
        for part in self._read(name, BLOCKS_CHUNK):
            data[done : done + len(part)] = np.frombuffer(part, np.uint8)
            done += len(part)
        halves = np.ascontiguousarray(data.reshape(-1, block_bytes)[:, : 2 * HALVES[stored.kind]]).view(np.float16)
        if not np.isfinite(halves).all():
            raise broken(self.path, f"{quoted(name)} has a scale that is NaN or infinite")
        return StoredBlocks(stored.kind, data.reshape(math.prod(stored.shape[:-1]), -1))

    def _read(self, name: str, most: int) -> Iterator[bytes]:
        """Yield the bytes of tensor `name`, `most` at once."""
        left = self.tensors[name].n_bytes
        try:
            with self.path.open("rb") as file:
                file.seek(self.tensors[name].start)
                while left:
                    data = file.read(min(left, most))
                    if len(data) < min(left, most):  # it has shrunk since
                        raise broken(self.path, f"it ends within {quoted(name)}")
                    yield data
                    left -= len(data)
        except OSError as error:
            raise unreadable(self.path, error) from error


def read(path: Path) -> GGUFFile:
    """Return the GGUF file at `path` with its header checked, and no tensor read. Raises CheckpointError."""
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file. Use the path of a .gguf file")
    try:
        with path.open("rb") as file:
            return GGUFFile(path, *_Walk(path, file).header())
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Return the refusal of a file that the system does not let us read."""
    return CheckpointError(f"cannot read {path}: {error.strerror or error}. Check its permissions and the disk")


def quoted(value: object) -> str:
    """Return a value from the file for a message: on one line, shortened."""
    short = reprlib.Repr()
    short.maxstring = 100
    return short.repr(value)


class _Walk:
    """One pass over a header, from its first byte to the last tensor's entry."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.size = path.stat().st_size
        self.position = 0
        self.items = 0

    def header(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        self._check_version()
        n_tensors, n_keys = self.unpack("QQ")
        self._check_count(n_keys, SMALLEST_KEY, "metadata keys")
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self.string()
            if key in metadata:
                raise self.broken(f"the key {quoted(key)} occurs twice")
            metadata[key] = self.value(self.unpack("I")[0])
        self._check_count(n_tensors, SMALLEST_TENSOR, "tensors")
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(n_tensors):
            name, entry = self.tensor()
            if name in entries:
                raise self.broken(f"the tensor {quoted(name)} occurs twice")
            entries[name] = entry
        return metadata, self._place(entries, self._data_start(metadata))

    def _check_version(self) -> None:
        magic = self.take(len(MAGIC))
        if magic != MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file: it begins with {magic!r}. Use a .gguf file")
        (version,) = self.unpack("I")
        if version & 0xFFFF == 0:
            raise CheckpointError(f"{self.path} is a big-endian GGUF file. Use a little-endian one")
        if version not in VERSIONS:
            raise CheckpointError(
                f"{self.path} has GGUF version {version}, but only {VERSIONS[0]} and {VERSIONS[1]} are supported. "
                "Convert the model again with a current llama.cpp"
            )

    def _check_count(self, count: int, smallest: int, what: str) -> None:
        if count > min(MAX_ENTRIES, (self.size - self.position) // smallest):
            raise self.broken(f"it claims {count} {what}, more than it can hold")

    def take(self, n: int) -> bytes:
        """Return the next `n` bytes, after checking that the file and the limit of a header have them."""
        if n > self.size - self.position:
            raise self.broken(f"{n} bytes are needed at {self.position}, but the file ends at {self.size}")
        if n > MAX_HEADER - self.position:
            raise self.broken(f"the header is longer than {MAX_HEADER} bytes")
        data = self.file.read(n)
        if len(data) < n:  # it has shrunk since
            raise self.broken(f"the file ends at {self.position + len(data)}")
        self.position += n
        return data

    def unpack(self, letters: str) -> tuple[Any, ...]:
        layout = f"<{letters}"
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def string(self) -> str:
        (length,) = self.unpack("Q")
        data = self.take(length)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise self.broken(f"the text at {self.position - length} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        """Return the metadata value that follows, of value type `kind`."""
        if kind in NUMBERS:
            return self.unpack(NUMBERS[kind])[0]
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise self.broken(f"the value type {kind} at {self.position} is not known")
        kind, count = self.unpack("IQ")
        if kind not in NUMBERS and kind != STRING:  # arrays of arrays exist in the format, in no model's file
            raise self.broken(f"an array has the item type {kind}, which is not supported")
        self.items += count
        if self.items > MAX_ITEMS:
            raise self.broken(f"its arrays have more than {MAX_ITEMS} items")
        return [self.string() for _ in range(count)] if kind == STRING else list(self.unpack(f"{count}{NUMBERS[kind]}"))

    def tensor(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        """Return the next tensor's name, and its shape, kind and offset in the data."""
        name = self.string()
        (n_dimensions,) = self.unpack("I")
        if not 1 <= n_dimensions <= MAX_DIMENSIONS:
            raise self.broken(f"{quoted(name)} has {n_dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
        *inside_first, kind, offset = self.unpack(f"{n_dimensions}QIQ")
        return name, (tuple(reversed(inside_first)), kind, offset)

    def _data_start(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.broken(f"general.alignment is {quoted(alignment)}, not a power of two")
        return -(-self.position // alignment) * alignment

    def _place(self, entries: dict[str, tuple[tuple[int, ...], int, int]], start: int) -> dict[str, StoredTensor]:
        """Return the tensors, after checking that each lies within the file and apart from the others."""
        tensors: dict[str, StoredTensor] = {}
        for name, (shape, number, offset) in entries.items():
            kind, n_bytes = self._measure(name, shape, number)
            if start + offset + n_bytes > self.size:
                raise self.broken(f"{quoted(name)} ends at {start + offset + n_bytes}, the file at {self.size}")
            tensors[name] = StoredTensor(shape, kind, start + offset, n_bytes)
        end = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
            if tensor.start < end:
                raise self.broken(f"{quoted(name)} overlaps another tensor")
            end = tensor.start + tensor.n_bytes
        return tensors

    def _measure(self, name: str, shape: tuple[int, ...], number: int) -> tuple[str, int]:
        """Return the name of kind `number`, and how many bytes a tensor of this shape has in it."""
        known = {kind.value: kind for kind in GGMLQuantizationType}
        kind = known[number].name if number in known else f"type {number}"
        if kind not in KINDS:
            raise CheckpointError(
                f"{self.path} stores {quoted(name)} as {kind}, which is not supported. "
                f"Use a file in one of {', '.join(KINDS)}"
            )
        block, size = GGML_QUANT_SIZES[known[number]]
        if 0 in shape or shape[-1] % block:
            raise self.broken(f"{quoted(name)} has shape {list(shape)}, not a multiple of {block}, in {kind}")
        return kind, math.prod(shape) // block * size

    def broken(self, reason: str) -> CheckpointError:
        return broken(self.path, reason)
