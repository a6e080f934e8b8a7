"""What tests of several folders share. Small things for any test are here, the rest is in modules by subject."""

from __future__ import annotations

import asyncio
import resource
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[2]
SOON = 60.0  # seconds that a test waits for what must come; none takes as long


def points(quick: int, *rows: Any) -> list[Any]:
    """Return the values of a parametrized test, of which only the first `quick` are no part of `full` alone."""
    return [*rows[:quick], *(pytest.param(*_row(row), marks=pytest.mark.full) for row in rows[quick:])]


def sample(n: int) -> int:
    """Return how many of `n` a simulation draws in this run."""
    return n if settings.default.max_examples >= settings.get_profile("full").max_examples else n // 2


def _row(row: Any) -> tuple[Any, ...]:
    return row if type(row) is tuple else (row,)  # a named tuple is one value


def run_async(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in a thread of its own: in this one, the loop of the browser's tests may be running."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, coroutine).result()


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Return as soon as `condition()` is true; fail when it is not in time.

    It asks ever less often: a question to a server takes both sides longer than the first pauses.
    """
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < seconds, "it did not happen in time"
        time.sleep(min(max(0.002, waited / 10), 0.05))


@contextmanager
def in_background(act: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run `act` in a thread meanwhile; the list gets its result, at the latest at the end."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(act()), daemon=True)
    thread.start()
    yield results
    thread.join(60)
    assert not thread.is_alive(), "it hangs"


@contextmanager
def limited(which: int, to: int) -> Iterator[None]:
    """Lower a limit of this process, and with it that of its children, meanwhile."""
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (to, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))
