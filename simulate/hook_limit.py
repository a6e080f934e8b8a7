"""The limit on a call of a policy's hook in the laboratory: a policy whose loop never ends gets a sentence.

A call that lasts LIMIT seconds gets a HookTimeout; if it catches that, too, the process ends GRACE seconds later. This
module must not know commands.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from scheduling.hook_limit import HookLimit

LIMIT = 5.0  # seconds, a thousand times what a hook needs
GRACE = 2.0
SHOW_CURSOR = "\x1b[?25h"


def _end(words: str) -> None:
    """Print an error and end the process at once: whatever is raised here, the policy catches it."""
    sys.stderr.write(f"{SHOW_CURSOR if sys.stderr.isatty() else ''}\nerror: {words}\n")
    sys.stderr.flush()
    os._exit(1)


def begin() -> None:
    """Limit the hooks for as long as a worker process lives, whose main thread this is; what they print goes to stderr.

    Its parent ends it after Ctrl-C.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = sys.stderr
    HookLimit(LIMIT, time.monotonic, GRACE, _end).__enter__()


@contextmanager
def limited(seconds: float = LIMIT) -> Iterator[None]:
    """Limit each call of a hook that the main thread makes; elsewhere, and without such timers, nothing is limited."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    with HookLimit(seconds, time.monotonic, GRACE, _end):
        yield
