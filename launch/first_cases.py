"""The first cases of the law checker on a user's own policy, before the server starts with it.

A hook with the wrong arguments would end the server at its first request, and a policy that admits none would let all
requests wait, so this takes a moment at the start and says what `simulate check` says.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from traceback import walk_stack

import policies
from launch import banner
from scheduling.located import locate

CASES = 40
SECONDS = 0.7  # for all of them, with what the checker itself imports


def check(name: str, options: Mapping[str, object] | None = None) -> None:
    """Warn of what is wrong with a policy, unless it is one of this project or nothing is found in time."""
    if not _is_own(name):
        return
    results: list[str] = []
    end = time.monotonic() + SECONDS
    # In a thread, because a hook may never return. The server replaces this process, and with it the thread.
    thread = threading.Thread(target=lambda: results.append(_problem(name, options, end)), daemon=True)
    thread.start()
    thread.join(SECONDS)
    if results:
        problem = results[0]
    else:
        frame = sys._current_frames().get(thread.ident or 0)
        place = locate(walk_stack(frame)) if frame is not None else None
        problem = f"{place}, has not returned for a while" if place else ""
    if problem:
        banner.warn(f"{problem}. The server starts all the same. Test it with ./eb simulate check {name}")


def _is_own(name: str) -> bool:
    try:
        policies.check_name(name, own=False)
    except ValueError:
        return True
    return False


def _problem(name: str, options: Mapping[str, object] | None, end: float) -> str:
    """Return which law the first cases break that can be tried until `end`, "" if none does."""
    from simulate.laws.check import first_broken

    broken = first_broken(name, CASES, options, lambda: time.monotonic() > end)
    return "" if broken is None else str(broken).partition("\n")[0].rstrip(".")
