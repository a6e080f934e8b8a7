"""One process a core: the same function for many cases, in order. This module must not know what a case is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from typing import Any, TypeVar

from rich.console import Console

from scheduling.hook_limit import HookTimeout
from simulate import hook_limit
from terminal.progress import counted

T = TypeVar("T")
Cases = Sequence[tuple[Any, ...]]


def spread(
    one: Callable[..., T], cases: Cases, jobs: int | None, console: Console, what: str, start: str = "spawn"
) -> Iterator[T]:
    """Yield `one(*case)` of each case from `jobs` processes, or from this one, and count them on the console as `what`.

    A hook that hangs, or Ctrl-C, ends all.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = min(jobs or cores, len(cases))
    workers = ProcessPoolExecutor(jobs, get_context(start), initializer=hook_limit.begin)
    # Before the thread that shows the progress: a process that forks should have no others.
    # Not `map`, which cancels what is left after an error, and Python 3.11 stumbles over canceled cases of a broken pool.
    futures = [workers.submit(one, *case) for case in cases] if jobs > 1 else []
    results = (future.result() for future in futures) if jobs > 1 else map(one, *zip(*cases))
    with workers, counted(console, len(cases), what) as progress:
        try:
            for done, result in enumerate(results, 1):
                progress(done)
                yield result
        except BrokenProcessPool as error:
            raise RuntimeError("a process that served requests has ended. See above, or use --jobs 1") from error
        except (HookTimeout, KeyboardInterrupt, GeneratorExit):
            for process in active_children():  # they would go on with the cases that they have been given
                process.terminate()
            raise
