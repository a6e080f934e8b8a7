"""Keeps an engine safe from a policy: stops hooks that do not return, and logs errors once. Pure but for the alarm.

This module must not know which engine it is.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from traceback import walk_stack
from types import FrameType

from policies import get_policy
from scheduling.hooks import overrides
from scheduling.located import described, locate, locate_error
from scheduling.policy import Policy

log = logging.getLogger("vllm.effective_batching")  # below the engine's own logger, which has a handler
HOOK_SECONDS = 1.0  # that the hooks of a step may take


class HookTimeout(Exception):
    """The hooks of a step did not return in time."""


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
        self._limits = threading.current_thread() is threading.main_thread()
        if self._limits:
            signal.signal(signal.SIGALRM, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if locate(list(walk_stack(frame))) is not None:  # never in the engine's own code
            raise HookTimeout(f"no answer within {HOOK_SECONDS:g} s. Look for a loop whose condition stays true")

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Stop hooks that take too long if the main thread calls them; other threads have no limit."""
        if self._limits:
            signal.setitimer(signal.ITIMER_REAL, HOOK_SECONDS, HOOK_SECONDS)
        try:
            yield
        finally:
            if self._limits:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def name(self, error: BaseException, policy: Policy, then: str) -> None:
        """Write an error to the log, if it is the first of its hook."""
        place = locate_error(error, policy)
        hook = place.hook if place else type(error).__name__
        self.faults[hook] += 1
        if self.faults[hook] == 1:
            log.error("policy %s failed in %s: %s. %s", policy.name, place or "its scheduler", described(error), then)
