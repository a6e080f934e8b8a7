"""Large work of handlers: done by one thread at a time, its memory returned to the system.

Threads that compute at the same time take as long together as one after the other, since they share the interpreter,
but the loop then waits for each of them before it gets it back. And glibc keeps what they free in an arena of each
thread: hundreds of megabytes in a few hundred threads that have each read a megabyte.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

LARGE = 1 << 13  # bytes; less is done at once
TRIM_EVERY = 16 << 20  # bytes
turn = threading.Lock()  # held by the thread that does large work
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, other C libraries do not
_used = 0


def alone(size: int) -> AbstractContextManager[None]:
    """Let work on so many bytes, if they are many, be done while no other thread does such work."""
    return _in_turn(size) if size > LARGE else nullcontext()


@contextmanager
def _in_turn(size: int) -> Iterator[None]:
    global _used
    with turn:
        _used += size
        if _used >= TRIM_EVERY:
            _used = 0
            if _trim is not None:
                _trim(0)  # releases the interpreter
        yield
