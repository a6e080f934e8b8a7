"""C files are compiled once, kept, compiled again when they change, and called as their header declares them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from generate.cpu import kernels
from generate.cpu.declarations import declarations
from generate.cpu.kernels import KernelError, load_library

HEADER = Path(kernels.__file__).with_name("kernels.h")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EB_CACHE_DIR", str(tmp_path / "cache"))
    try:
        kernels.find_compiler()
    except KernelError as error:
        pytest.skip(str(error))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    source = tmp_path / "small.c"
    source.write_text("int answer(void) { return ANSWER; }\n")
    return source


def test_flags_and_source_make_another_library(small: Path) -> None:
    assert load_library(small, ["-DANSWER=1"]).answer() == 1
    assert load_library(small, ["-DANSWER=2"]).answer() == 2
    small.write_text("int answer(void) { return -ANSWER; }\n")
    assert load_library(small, ["-DANSWER=2"]).answer() == -2


def test_a_damaged_library_is_built_again(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EB_CACHE_DIR", str(tmp_path / "kept"))
    load_library(small, ["-DANSWER=3"])
    (kept,) = (tmp_path / "kept").iterdir()
    kept.unlink()
    kept.write_bytes(b"\x7fELF cut short")
    assert load_library(small, ["-DANSWER=3"]).answer() == 3


def test_a_cache_that_cannot_be_written_is_not_needed(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("EB_CACHE_DIR", str(tmp_path / "file" / "kept"))
    assert load_library(small, ["-DANSWER=4"]).answer() == 4


def test_a_failed_compilation_reports_the_compilers_message(small: Path) -> None:
    with pytest.raises(KernelError, match="ANSWER"):
        load_library(small)


def test_structs_have_the_compilers_sizes_and_offsets(tmp_path: Path) -> None:
    structs = declarations().structs
    members = [(struct, name) for struct, kind in structs.items() for name, *_ in kind._fields_]
    offsets = ", ".join(f"__builtin_offsetof({struct}, {name})" for struct, name in members)
    sizes = ", ".join(f"sizeof({struct})" for struct in structs)
    source = tmp_path / "layout.c"
    source.write_text(f'#include "kernels.h"\nint64_t offsets[] = {{{offsets}}};\nint64_t sizes[] = {{{sizes}}};\n')
    (tmp_path / "kernels.h").write_text(HEADER.read_text())
    library = load_library(source)
    compiled = (ctypes.c_int64 * len(members)).in_dll(library, "offsets")
    assert [*compiled] == [getattr(structs[struct], name).offset for struct, name in members]
    assert len(members) > 20
    compiled_sizes = (ctypes.c_int64 * len(structs)).in_dll(library, "sizes")
    assert [*compiled_sizes] == [ctypes.sizeof(kind) for kind in structs.values()]


def test_functions_have_the_headers_types() -> None:
    functions = declarations().functions
    pointer, integer, number = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
    assert functions["paged_attention_bf16"] == (integer, [pointer] * 7 + [integer] * 8 + [number])
    assert functions["packed_linear_bytes"] == (ctypes.c_int64, [integer, ctypes.c_int64, ctypes.c_int64])
    assert functions["paged_attention_has_bf16"] == (integer, [])
    assert functions["use_team"] == (None, [pointer, integer])
