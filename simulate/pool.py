"""One process a core: the same function for many cases, in order. This module must not know what a case is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from typing import Any, TypeVar

from scheduling.hook_limit import HookTimeout
from simulate import hook_limit

T = TypeVar("T")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spread(one: Callable[..., T], cases: Sequence[tuple[Any, ...]], jobs: int) -> Iterator[T]:
    """Yield `one(*case)` of each case, from as many processes, or from this one; a hook that hangs, or Ctrl-C, ends all."""
    if jobs == 1:
        yield from (one(*case) for case in cases)
        return
    # A forked process knows the classes of a notebook, which no other could import.
    context = get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(jobs, context, initializer=hook_limit.begin) as pool:
        try:
            yield from pool.map(one, *zip(*cases))
        except BrokenProcessPool as error:
            raise RuntimeError("a process that served requests has ended. See above, or use --jobs 1") from error
        except (HookTimeout, KeyboardInterrupt, GeneratorExit):
            pool.shutdown(wait=False, cancel_futures=True)  # Python 3.11 stumbles over cases left canceled
            for process in active_children():  # they would go on with the cases that they have been given
                process.terminate()
            raise
