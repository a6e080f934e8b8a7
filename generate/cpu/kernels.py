"""C files of the engine: compiled at the first start with the system's compiler, kept, and loaded.

A library is kept under a hash of its source with the headers beside it, the flags, the compiler and the processor, so
that a changed file or another processor compiles it again. `begin` compiles in the background, several files at once,
while weights are read. Compiling and linking are two steps: a link with -ffast-math
would add code that turns off denormals in the whole process, and a caller may pass that flag to the compiler.

It must not know what the functions in a file compute.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path

import torch  # noqa: F401  its OpenMP must be loaded first, so that a library joins the same pool of threads

from models.cache import cache_directory

log = logging.getLogger(__name__)
_warn_once = functools.cache(log.warning)

FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
OPENMP = "-fopenmp"
COMPILE_SECONDS = 120.0
ROOM = 4 << 20  # bytes that a cache directory must have free; all libraries together have 0.6 MB
_begun: dict[tuple[Path, tuple[str, ...]], Future[ctypes.CDLL]] = {}


class KernelError(RuntimeError):
    """A C file could not be compiled or loaded; the message holds the compiler's first lines."""


def begin(source: Path, extra_flags: Sequence[str] = ()) -> Future[ctypes.CDLL] | None:
    """Start `load_library` in the background; the next call with the same arguments gets its result or its error.

    Return the library to come if it must be compiled first, None if it is in the cache or cannot be compiled.
    """
    try:
        kept = kept_beside(source, extra_flags)
        must_compile = kept is None or not kept.with_suffix(".so").exists()
    except (KernelError, OSError):  # which `load_library` raises
        must_compile = False
    loading = _begun[source, tuple(extra_flags)] = Future[ctypes.CDLL]()

    def load() -> None:
        try:
            loading.set_result(_load(source, extra_flags))
        except Exception as error:  # for the thread that asks
            loading.set_exception(error)

    threading.Thread(target=load, name=f"load-{source.stem}", daemon=True).start()  # Ctrl-C does not wait for it
    return loading if must_compile else None


def load_library(source: Path, extra_flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Load the library compiled from C file `source`, compiling it where the cache does not have it.

    `extra_flags` are added when compiling, not when linking. Where the cache directory cannot be written or is full,
    the library is built in a temporary directory for this process alone. Functions of a `ctypes.CDLL` run without
    the GIL. Waits for all that have begun: what is measured next needs the cores. Raises KernelError.
    """
    wait([*_begun.values()])
    begun = _begun.pop((source, tuple(extra_flags)), None)
    return begun.result() if begun else _load(source, extra_flags)


def _load(source: Path, extra_flags: Sequence[str]) -> ctypes.CDLL:
    compiler = find_compiler()
    flags = _flags(extra_flags)
    name = _name(source, compiler, flags) + ".so"
    folder = cache_directory()
    if folder and (folder / name).exists():
        try:
            return ctypes.CDLL(str(folder / name))
        except OSError as error:  # truncated by a full disk, or built against libraries that are gone
            log.info("cannot load %s (%s), so it is compiled again", folder / name, error)
    with _workshop(folder) as workshop:
        library = _build(compiler, flags, source, Path(workshop) / name)
        if folder and library.parent.parent == folder:
            library = library.replace(folder / name)  # two processes at once: both files are whole
        try:
            return ctypes.CDLL(str(library))
        except OSError as error:
            raise KernelError(f"{source.name} was compiled but cannot be loaded: {error}") from error


def kept_beside(source: Path, extra_flags: Sequence[str] = ()) -> Path | None:
    """Return the file for what is measured of the library that `load_library` compiles; None where there is no cache.

    It has another name for another source, compiler or processor. Raises KernelError where there is no compiler.
    """
    folder = cache_directory()
    return folder / (_name(source, find_compiler(), _flags(extra_flags)) + ".json") if folder else None


def _flags(extra: Sequence[str]) -> list[str]:
    return [*FLAGS, *_machine_flags(), *extra]


def _name(source: Path, compiler: list[str], flags: list[str]) -> str:
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    key = "\0".join([*texts, *compiler, _version(tuple(compiler)), *flags, _processor()])
    return f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"


def _workshop(folder: Path | None) -> tempfile.TemporaryDirectory[str]:
    """Make a directory to build in: inside `folder`, so that the result can be renamed, where that has room."""
    try:
        if folder:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if shutil.disk_usage(folder).free < ROOM:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return tempfile.TemporaryDirectory(dir=folder)
    except OSError as error:
        _warn_once(
            "cannot keep compiled kernels in %s: %s. Each start compiles them again, which takes a minute. Free some space "
            "there, or set EB_CACHE_DIR to another folder", folder, error.strerror,
        )  # fmt: skip
    return tempfile.TemporaryDirectory()


def find_compiler() -> list[str]:
    """Return the command of the C compiler: $CC, cc, gcc or clang. Raises KernelError where there is none."""
    if chosen := os.environ.get("CC"):
        command = shlex.split(chosen)
        if command and shutil.which(command[0]):
            return command
        raise KernelError(f"the compiler CC={chosen!r} was not found. Unset CC or install it")
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    raise KernelError("no C compiler (cc, gcc, clang). Install one, for example: apt install gcc")


def _build(compiler: list[str], flags: list[str], source: Path, library: Path) -> Path:
    compiled = library.with_suffix(".o")
    try:
        _run([*compiler, *flags, OPENMP, "-c", str(source), "-o", str(compiled)])
        openmp = [OPENMP]
    except KernelError as first:
        try:  # Apple's clang has no OpenMP: one thread of C is still far faster than none
            _run([*compiler, *flags, "-fopenmp-simd", "-c", str(source), "-o", str(compiled)])
        except KernelError:
            raise first from None
        log.info("%s compiles only without OpenMP, so it uses one thread: %s", source.name, first)
        openmp = []
    _run([*compiler, "-shared", *openmp, str(compiled), "-o", str(library), "-lm"])
    return library


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"cannot run {command[0]}: {error}") from error
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()][:6]
        raise KernelError(f"{command[0]} exited with {done.returncode}: " + " | ".join(lines))


def _machine_flags() -> list[str]:
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        # gcc's own choice is 256 bits even where 512 are faster
        return ["-march=native", "-mprefer-vector-width=512"]
    return ["-mcpu=native"] if machine in ("aarch64", "arm64") else []


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


@functools.cache
def _processor() -> str:
    """Return what -march=native depends on, as far as the system knows."""
    wanted = ("flags", "Features", "model name", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return "\n".join([platform.platform(), platform.processor(), *sorted({x for x in lines if x.startswith(wanted)})])
