"""Large work of handlers: only one thread at a time does any, and freed memory is returned to the system.

Threads share the interpreter, so large work in parallel saves no time, but the loop would have to wait for each of these
threads before it gets the interpreter back. And glibc keeps freed memory in an arena per thread: hundreds of megabytes in
a few hundred threads that have each read a megabyte.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

LARGE = 1 << 13  # bytes; smaller work needs no turn
TRIM_EVERY = 16 << 20  # bytes
_context: Callable[[], AbstractContextManager[None]] = nullcontext  # of large work
turn = threading.Lock()  # held by the thread that does large work
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, other C libraries do not
_used = 0


def free_at_once() -> None:
    """Have glibc return a block of a megabyte as soon as it is freed: by default it keeps those of up to 32 MB."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD


def compute_in(context: Callable[[], AbstractContextManager[None]]) -> None:
    """Do large work in this context from now on, such as on other processors."""
    global _context
    _context = context


def serialize_large(size: int) -> AbstractContextManager[None]:
    """Return a context for work on `size` bytes: large work waits there for its turn, smaller work enters at once."""
    return _in_turn(size) if size > LARGE else nullcontext()


@contextmanager
def _in_turn(size: int) -> Iterator[None]:
    global _used
    with turn, _context():
        _used += size
        if _used >= TRIM_EVERY:
            _used = 0
            if _trim is not None:
                _trim(0)  # releases the interpreter
        yield
