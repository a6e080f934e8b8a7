"""Return freed memory to the system: glibc keeps it in an arena of each thread that once needed it.

A few hundred threads that have each read a megabyte hold hundreds of megabytes that nobody uses.
"""

from __future__ import annotations

import ctypes

EVERY = 16 << 20  # bytes
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, other C libraries do not
_used = 0


def used(size: int) -> None:
    """Count memory that is about to be freed, and trim the heap once it adds up. Not thread-safe."""
    global _used
    _used += size
    if _used >= EVERY:
        _used = 0
        if _trim is not None:
            _trim(0)  # releases the GIL
