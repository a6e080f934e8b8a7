"""A GGUF file from a stranger: whatever its header claims, it is refused in bounded memory."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.gguf import gguf_file
from models.sources.checkpoint import CheckpointError
from tests.support.gguf import tiny

HUGE = 2**60
STRING, ARRAY = 8, 9
SPACE = 4096  # bytes behind a header, which its tensors may lie in


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes = b"") -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(*parts: bytes, n_tensors: int = 0, n_keys: int = 0, magic: bytes = b"GGUF", version: int = 3) -> bytes:
    return magic + struct.pack("<IQQ", version, n_tensors, n_keys) + b"".join(parts) + bytes(SPACE)


HOSTILE = {
    "empty": b"",
    "magic alone": b"GGUF",
    "other magic": header(magic=b"GGML"),
    "version 1": header(version=1),
    "version to come": header(version=4),
    "big endian": header(version=3 << 24),
    "tensors": header(n_tensors=HUGE),
    "keys": header(n_keys=HUGE),
    "the most keys": header(n_keys=2**64 - 1, n_tensors=2**64 - 1),
    "more keys than any model has": header(*(key(b"%d" % i, 0, b"1") for i in range(70_000)), n_keys=70_000),
    "length of a key": header(struct.pack("<Q", HUGE), n_keys=1),
    "length of a string": header(key(b"k", STRING, struct.pack("<Q", HUGE)), n_keys=1),
    "length of an array": header(key(b"k", ARRAY, struct.pack("<IQ", 0, HUGE)), n_keys=1),
    "strings in an array": header(key(b"k", ARRAY, struct.pack("<IQ", STRING, HUGE)), n_keys=1),
    "array of arrays": header(key(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1)), n_keys=1),
    "type of a value": header(key(b"k", 13), n_keys=1),
    "key twice": header(key(b"k", 0, b"1"), key(b"k", 0, b"1"), n_keys=2),
    "key that is no text": header(key(b"\xff", 0, b"1"), n_keys=1),
    "alignment": header(key(b"general.alignment", 4, struct.pack("<I", 3)), tensor(b"t", 1), n_keys=1, n_tensors=1),
    "no alignment": header(key(b"general.alignment", 4, bytes(4)), tensor(b"t", 1), n_keys=1, n_tensors=1),
    "tensor twice": header(tensor(b"t", 1), tensor(b"t", 1, offset=32), n_tensors=2),
    "tensors overlap": header(tensor(b"t", 16), tensor(b"u", 16, offset=32), n_tensors=2),
    "tensor larger than the file": header(tensor(b"t", HUGE), n_tensors=1),
    "tensor of 2^240 values": header(tensor(b"t", HUGE, HUGE, HUGE, HUGE), n_tensors=1),
    "tensor without values": header(tensor(b"t", 4, 0), n_tensors=1),
    "tensor behind the end": header(tensor(b"t", 4, offset=2**64 - 1), n_tensors=1),
    "half a block": header(tensor(b"t", 16, kind=2), n_tensors=1),
    "kind": header(tensor(b"t", 32, kind=99), n_tensors=1),
    "integers": header(tensor(b"t", 32, kind=26), n_tensors=1),
    "dimensions": header(text(b"t") + struct.pack("<I", 2**32 - 1), n_tensors=1),
    "no dimensions": header(tensor(b"t"), n_tensors=1),
    "name that is no text": header(tensor(b"\xff", 1), n_tensors=1),
}


def read_all(path: Path) -> None:
    """Do all that serving a file does with it."""
    file = gguf_file.read(path)
    gguf_file.config(file)
    gguf_file.shapes(file)
    for _ in gguf_file.tensors(file):
        pass


def peak_of_refusal(path: Path) -> int:
    """Return the bytes that reading `path` took at most, whether it was refused or not."""
    tracemalloc.start()
    try:
        with contextlib.suppress(CheckpointError):
            read_all(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(HOSTILE[case])
    with pytest.raises(CheckpointError):
        gguf_file.read(path)
    assert peak_of_refusal(path) < 2**20


def test_what_is_beside_the_wrong_length_is_valid(tmp_path: Path) -> None:
    """The cases above are refused for what they name: the same parts with true lengths are read."""
    values = key(b"s", STRING, text(b"x")) + key(b"a", ARRAY, struct.pack("<IQ2B", 0, 2, 7, 8))
    path = tmp_path / "model.gguf"
    path.write_bytes(header(values, tensor(b"t", 8, 2), tensor(b"u", 32, kind=2, offset=64), n_keys=2, n_tensors=2))
    file = gguf_file.read(path)
    assert file.metadata == {"s": "x", "a": [7, 8]}
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == {"t": (2, 8), "u": (32,)}


@pytest.mark.parametrize("numbers", [2**31, 5 * 2**20])
@pytest.mark.parametrize("kind", ["array", "string"])
def test_a_sparse_file_cannot_make_its_header_take_memory(kind: str, numbers: int, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    array = key(b"k", ARRAY, struct.pack("<IQ", 0, numbers))  # a byte each
    path.write_bytes(header(array if kind == "array" else key(b"k", STRING, struct.pack("<Q", numbers)), n_keys=1))
    with path.open("r+b") as file:
        file.truncate(numbers + 2**20)
    assert peak_of_refusal(path) < (2**20 if kind == "array" or numbers == 2**31 else 4 * numbers)


@pytest.mark.parametrize("what", ["folder", "missing"])
def test_what_is_no_file_is_refused(what: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        gguf_file.read(tmp_path if what == "folder" else tmp_path / "none.gguf")


def test_a_file_that_shrinks_after_its_header_was_read_is_refused(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model.gguf")
    file = gguf_file.read(path)
    with path.open("r+b") as opened:
        opened.truncate(file.tensors["token_embd.weight"].start + 100)
    with pytest.raises(CheckpointError):
        file.tensor("token_embd.weight")


def sample(folder: Path) -> bytes:
    """Return a small file with all kinds of values and several tensors."""
    changes = {"tokenizer.ggml.tokens": ["a", "bc"], "tokenizer.ggml.scores": [0.5, 1.0], "attention.causal": True,
               "general.name": "sample", "tokenizer.ggml.eos_token_id": 2}  # fmt: skip
    q_proj = (np.zeros((32, 18), np.uint8), Kind.Q4_0)
    return tiny(folder / "sample.gguf", changes, {"blk.0.attn_q.weight": q_proj}).read_bytes()


lengths = st.one_of(st.sampled_from([0, 1, 2**31, 2**32 - 1, HUGE, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))
mutations = st.one_of(
    st.tuples(st.just("byte"), st.integers(0, 2**20), st.integers(0, 255)),
    st.tuples(st.just("number"), st.integers(0, 2**20), lengths),
    st.tuples(st.just("insert"), st.integers(0, 2**20), st.integers(0, 255)),
    st.tuples(st.just("cut"), st.integers(0, 2**20), st.just(0)),
)


def mutated(data: bytes, kind: str, place: int, value: int) -> bytes:
    place %= max(1, min(len(data), 1400))  # within the header
    if kind == "cut":
        return data[:place]
    middle = struct.pack("<Q", value) if kind == "number" else bytes([value])
    return data[:place] + middle + data[place + (0 if kind == "insert" else len(middle)) :]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path]:
    """Return a valid file's bytes, and where to write what becomes of them."""
    folder = tmp_path_factory.mktemp("fuzz")
    data = sample(folder)
    read_all(folder / "sample.gguf")
    return data, folder / "mutated.gguf"


@settings(max_examples=10 * settings.default.max_examples)
@given(changes=st.lists(mutations, min_size=1, max_size=3))
@example(changes=[("number", 8, HUGE)])
@example(changes=[("number", 16, HUGE)])
def test_a_mutated_header_is_read_or_refused_in_bounded_memory(
    original: tuple[bytes, Path], changes: list[tuple[str, int, int]]
) -> None:
    data, path = original
    for change in changes:
        data = mutated(data, *change)
    path.write_bytes(data)
    assert peak_of_refusal(path) < 2**22
