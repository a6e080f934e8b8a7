"""Keeps an engine safe from a policy: stops hooks that do not return, and logs errors once. Pure but for the alarm.

This module must not know which engine it is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from policies import get_policy
from scheduling.hook_limit import HookLimit
from scheduling.hooks import overrides
from scheduling.located import described, locate_error
from scheduling.policy import Policy

log = logging.getLogger("vllm.effective_batching")  # below the engine's own logger, which has a handler
HOOK_SECONDS = 1.0  # that the hooks of a step may take


def make_policy(name: str, slots: int, options: Mapping[str, object]) -> Policy:
    """Return a policy for an engine that allocates pages as answers grow; ValueError for a wrong name or option."""
    policy = get_policy(name, slots, options)
    # To reserve whole answers would leave an engine emptier than without a policy: it preempts when pages run out.
    if not overrides(policy, "reserve_tokens") and not policy.padded and not policy.closed:
        policy.reserve_tokens = lambda seq: seq.length + policy.margin  # type: ignore[method-assign]
    return policy


class Guard:
    """Counts the errors of hooks in `faults`, and names the first of each hook."""

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()
        is_main = threading.current_thread() is threading.main_thread()
        self._limit = HookLimit(HOOK_SECONDS, time.monotonic) if is_main else None
        self._is_limited = False

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Stop hooks that take too long if the main thread calls them; other threads have no limit."""
        if self._limit is None or self._is_limited:  # what an inner call takes counts with the outer one
            yield
            return
        self._is_limited = True
        self._limit.start()
        try:
            yield
        finally:
            self._limit.stop()
            self._is_limited = False

    def name(self, error: BaseException, policy: Policy, then: str) -> None:
        """Write an error to the log, if it is the first of its hook."""
        place = locate_error(error, policy)
        hook = place.hook if place else type(error).__name__
        self.faults[hook] += 1
        if self.faults[hook] == 1:
            log.error("policy %s failed in %s: %s. %s", policy.name, place or "its scheduler", described(error), then)
