"""The threads of the C kernels: a team of our own (team.c), or OpenMP's.

Our own team serves where a step is C from end to end. Where PyTorch computes a part of it, the kernels use PyTorch's
OpenMP threads, since two pools on the same cores get in each other's way. It must not know what the kernels compute.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from pathlib import Path

from generate.cpu import kernels
from generate.cpu.declarations import declarations

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("team.c")
PATIENCE_US = 50  # how long a helper spins before it sleeps: longer than the gaps within a step


class Team:
    """The threads that share the work of all kernels that have joined; one thread until `use` is called."""

    def __init__(self) -> None:
        self._kernels: list[ctypes.CDLL] = []
        self._run: ctypes.c_void_p | None = None
        self.size = 1

    def join(self, library: ctypes.CDLL) -> ctypes.CDLL:
        """Let a library that includes team.h share out its work; return it."""
        declarations().apply(library)
        self._kernels.append(library)
        library.use_team(self._run, self.size)
        return library

    def use(self, threads: int, own: bool) -> None:
        """Compute with `threads` threads, our own or OpenMP's; with one where no others can be started."""
        self._run, self.size = None, 1
        if threads > 1:
            try:
                self._start(threads, own)
            except (kernels.KernelError, OSError) as error:
                log.warning("the kernels use one thread: %s", error)
        for library in self._kernels:
            library.use_team(self._run, self.size)

    def _start(self, threads: int, own: bool) -> None:
        library = _library()
        entry = library.team_run if own else library.openmp_run
        self.size = library.team_start(threads, PATIENCE_US) if own else library.openmp_start(threads)
        self._run = ctypes.cast(entry, ctypes.c_void_p)


@functools.cache
def team() -> Team:
    """Return the team of this process: all kernels share its cores."""
    return Team()


@functools.cache
def load(source: Path, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Return the library of a C file that includes team.h, once it shares out its work. Raises KernelError."""
    return team().join(kernels.load_library(source, flags))


def load_unless_off(source: Path, what: str, instead: str) -> ctypes.CDLL | None:
    """Return `what` a C file computes; None where EB_KERNELS=off selects what serves instead, or it does not compile."""
    return None if os.environ.get("EB_KERNELS") == "off" else _load_or_warn(source, what, instead)


@functools.cache
def _load_or_warn(source: Path, what: str, instead: str) -> ctypes.CDLL | None:
    try:
        return load(source)
    except (kernels.KernelError, OSError) as error:
        log.warning("%s does not run; using %s: %s", what, instead, error)
        return None


@functools.cache
def _library() -> ctypes.CDLL:
    return declarations().apply(kernels.load_library(SOURCE))
