"""C files are compiled once, kept, compiled again when they change, and called as their header declares them."""

from __future__ import annotations

import ctypes
import os
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from generate.cpu import kernels
from generate.cpu.declarations import declarations
from generate.cpu.kernels import KernelError, load_library
from generate.machine import prepare
from tests.support.generate import need_compiler

HEADER = Path(kernels.__file__).with_name("kernels.h")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EB_CACHE_DIR", str(tmp_path / "cache"))
    need_compiler()


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


def test_a_damaged_library_is_built_again_and_a_cache_that_cannot_be_written_is_not_needed(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_library(small, ["-DANSWER=3"])
    (kept,) = (tmp_path / "cache").iterdir()
    kept.unlink()
    kept.write_bytes(b"\x7fELF cut short")
    assert load_library(small, ["-DANSWER=3"]).answer() == 3
    monkeypatch.setenv("EB_CACHE_DIR", str(small / "kept"))
    assert load_library(small, ["-DANSWER=4"]).answer() == 4


def test_a_cache_without_room_is_not_needed_and_its_remedy_is_logged_once(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    assert [load_library(small, [f"-DANSWER={n}"]).answer() for n in (5, 6)] == [5, 6]
    assert list((tmp_path / "cache").iterdir()) == []
    assert ["EB_CACHE_DIR" in record.getMessage() for record in caplog.records] == [True]


def test_a_failed_compilation_reports_the_compilers_message(small: Path) -> None:
    with pytest.raises(KernelError, match="ANSWER"):
        load_library(small)


def test_libraries_that_are_begun_are_compiled_at_the_same_time_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        (tmp_path / f"{name}.c").write_text(f"int answer(void) {{ return '{name}'; }}")
    meeting, compilations, compiler = (tmp_path / name for name in ("meeting", "compilations", "compiler"))
    os.mkfifo(meeting)  # opens when both compilers are there
    meet = f"*a.c*) echo a > {meeting};; *b.c*) read x < {meeting};;"
    real = shlex.join(kernels.find_compiler())
    compiler.write_text(f'#!/bin/sh\ncase "$*" in {meet} esac\necho "$@" >> {compilations}\nexec {real} "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", f"{compiler}")
    monkeypatch.setattr(kernels, "COMPILE_SECONDS", 60)
    for name in "ab":
        kernels.begin(tmp_path / f"{name}.c")
    assert [load_library(tmp_path / f"{name}.c").answer() for name in "ab"] == [ord("a"), ord("b")]
    assert compilations.read_text().count(" -c ") == 2


def test_what_must_be_compiled_is_known_at_once(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling = kernels.begin(small, ["-DANSWER=5"])
    assert compiling is not None
    assert load_library(small, ["-DANSWER=5"]).answer() == 5
    assert compiling.done()
    assert kernels.begin(small, ["-DANSWER=5"]) is None  # it is in the cache
    assert load_library(small, ["-DANSWER=5"]).answer() == 5
    monkeypatch.setenv("CC", "no-such-compiler")
    assert kernels.begin(small, ["-DANSWER=6"]) is None
    with pytest.raises(KernelError, match="no-such-compiler"):
        load_library(small, ["-DANSWER=6"])


def test_a_failure_in_the_background_is_told_to_the_one_who_asks(small: Path) -> None:
    kernels.begin(small)
    kernels.begin(small, ["-DANSWER=5"])
    assert load_library(small, ["-DANSWER=5"]).answer() == 5
    with pytest.raises(KernelError, match="ANSWER"):
        load_library(small)


@pytest.mark.parametrize(("dtype", "quantize", "compiled"), [("float32", "none", False), ("bfloat16", "none", True)])
def test_linear_layers_are_compiled_early_where_the_model_takes_them(
    dtype: str, quantize: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: set[str] = set()

    def begin(source: Path, flags: tuple[str, ...] = ()) -> str | None:
        begun.add(source.name)
        return "to come" if source.name in ("blocks.c", "packed_linear.c") else None

    monkeypatch.setattr(kernels, "begin", begin)
    assert len(prepare(getattr(torch, dtype), quantize)) == 1 + compiled
    assert ("packed_linear.c" in begun) is compiled
    assert {"paged_attention.c", "sampler.c", "team.c", "blocks.c"} <= begun


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
    numbers = [number, integer, number, integer]
    assert functions["paged_attention_bf16"] == (integer, [pointer] * 7 + [integer] * 8 + numbers)
    assert functions["packed_linear_bytes"] == (ctypes.c_int64, [integer, ctypes.c_int64, ctypes.c_int64])
    assert functions["paged_attention_use"] == (integer, [integer])
    assert functions["use_team"] == (None, [pointer, integer])
