"""Whether the process can still get memory. This module must not know what for.

Python and torch raise an error when an allocation fails. The tokenizer, the validator and oneDNN do not: they end the
process, and every open connection with it. So their callers ask for more than these need before they call them.
"""

from __future__ import annotations

import mmap
import time

NO_MEMORY = "the server has no memory left for this request. Try again later"
HEADROOM = 64 << 20  # bytes; steps whose tensors need more fail with torch's own error
LASTING = 0.01  # seconds for which memory that was granted counts as there
_granted_at = 0.0


class NoHeadroom(MemoryError):
    """The system grants the process no more memory."""


def check_headroom() -> None:
    """Raise NoHeadroom unless the process can get HEADROOM bytes; they are never written, and given back at once."""
    global _granted_at
    if (now := time.monotonic()) < _granted_at + LASTING:
        return
    try:
        mmap.mmap(-1, HEADROOM, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError):
        raise NoHeadroom(NO_MEMORY) from None
    _granted_at = now
