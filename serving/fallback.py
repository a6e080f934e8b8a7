"""The way back from a policy that was switched to and fails: to the policy before it, with every request.

The policy of the start has none before it: its error ends the loop. This module must not know HTTP, or what is computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from scheduling.located import described, failure, locate_error
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence

log = logging.getLogger(__name__)

MOST_BEFORE = 8  # policies to go back to, with that of the start


@dataclass(frozen=True)
class PolicyFailure:
    """What a policy raised, where, and which policy serves instead; `time` is in seconds since 1970.

    `hook`, `file` and `line` are None if no hook is at fault.
    """

    policy: str
    error: str
    hook: str | None
    file: str | None
    line: int | None
    now: str
    time: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Fallback:
    """The policies that one scheduler was switched away from, and what happened to those that failed.

    The loop's thread calls `listeners` after each switch, also after one back.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.last: PolicyFailure | None = None
        self.listeners: list[Callable[[], None]] = []
        self._before: list[Policy] = []

    def switch(self, scheduler: Scheduler, policy: Policy, now: float) -> list[Sequence]:
        """Switch to `policy`; return the sequences that leave. Nothing changes if it raises an error."""
        before = scheduler.policy.renew()  # without what the old one remembers, which is void when it comes back
        sharing = scheduler.sharing
        raised, kept, sharing.raises = sharing.raises, len(sharing.errors), False
        try:
            left = scheduler.switch(policy, now)
        except BaseException:
            sharing.raises = raised
            del sharing.errors[kept:]
            raise
        self._before.append(before)
        del self._before[1 : -MOST_BEFORE + 1]  # that of the start stays
        return left

    def go_back(self, scheduler: Scheduler, error: BaseException, now: float) -> list[Sequence]:
        """Switch to the policy before the one that raised an error; return the sequences that leave.

        If that one fails at once, the one before it follows, and so on. The error of the first is raised.
        """
        failed = scheduler.policy
        while self._before:
            policy = self._before.pop()
            # The policy of the start fails at once.
            scheduler.sharing.errors, scheduler.sharing.raises = [], not self._before
            try:
                left = scheduler.switch(policy, now)
            except BaseException as other:
                self._note(failed, error, policy)
                failed, error = policy, other
            else:
                self._note(failed, error, policy)
                return left
        raise error

    def _note(self, failed: Policy, error: BaseException, policy: Policy) -> None:
        """Count and log a failure."""
        place = locate_error(error, failed)
        words = described(error)
        self.failures += 1
        found: tuple[str | None, str | None, int | None] = (None, None, None)
        if place:
            found = place.hook, PurePath(place.file).name, place.line
        self.last = PolicyFailure(failed.name, words, *found, policy.name, time.time())
        where = f" in {place.hook}(), line {place.line} of {place.file}" if place else ""
        log.error(
            "the policy %s failed%s: %s. The server went back to %s and kept every request",
            failed.name, where, words, policy.name,
        )  # fmt: skip


def switch_problem(error: BaseException, policy: Policy) -> str:
    """Return why a policy that was to serve does not."""
    return (
        f"the policy {policy.name} fails on the requests that are here ({failure(error, policy)}), so the policy is "
        "unchanged. Correct its options, or use another policy"
    )
