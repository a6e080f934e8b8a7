"""The way back from a policy that was switched to: to the one before it, with every request, if it fails or its lease ends.

The policy of the start has none before it: its error ends the loop. This module must not know HTTP, or what is computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import inf
from pathlib import PurePath
from typing import Any

from scheduling.located import described, failure, locate_error
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from serving.inference import InferenceError

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


@dataclass(frozen=True)
class Lease:
    """For how many seconds from now `holder` may have another policy serve; `renews` means that it had a lease before."""

    holder: str
    seconds: float
    renews: bool = False


class Fallback:
    """The policies that one scheduler was switched away from, and what happened to those that failed.

    The loop's thread calls `listeners` after each switch, also after one back. While `holder` is set, the policy before its
    lease comes last in the list: the object itself, since a policy's file, and what it has learned, cannot be made again by
    name. Behind it is a new one like it, in case that it fails.
    """

    def __init__(self, log: logging.Logger = log) -> None:
        self.failures, self._log = 0, log
        self.last: PolicyFailure | None = None
        self.listeners: list[Callable[[], None]] = []
        self._before: list[Policy] = []
        self.holder = ""  # of the lease, if there is one
        self.ends_at = inf

    def switch(self, scheduler: Scheduler, policy: Policy, now: float, lease: Lease | None = None) -> list[Sequence]:
        """Switch to `policy`, with a lease for a while; return the sequences that leave. Nothing changes if it raises an error.

        Raise InferenceError as `check` does.
        """
        self.check(lease, now)
        replaced = scheduler.policy
        before = replaced.renew()  # without what the old one remembers, which is void when it comes back
        sharing = scheduler.sharing
        raised, kept, sharing.raises = sharing.raises, len(sharing.errors), False
        try:
            left = scheduler.switch(policy, now)
        except BaseException:
            sharing.raises = raised
            del sharing.errors[kept:]
            raise
        if not self.holder:  # those that serve within a lease are not gone back to
            self._before.append(before)
            if lease is not None and _forgets(replaced, [*sharing.running, *scheduler.waiting, *left], now):
                self._before.append(replaced)
            del self._before[1 : -MOST_BEFORE + 1]  # that of the start stays
        if lease is not None:
            self.holder, self.ends_at = lease.holder, now + lease.seconds
        return left

    def check(self, lease: Lease | None, now: float) -> None:
        """Raise InferenceError if another holds a lease, or if that which is to be renewed has ended."""
        if self.holder and (lease is None or lease.holder != self.holder):
            text = f"another client has leased the policy for {self.ends_at - now:.0f} s more. Wait, or send DELETE /policy/lease"
            raise InferenceError("conflict_error", text)
        if lease is not None and lease.renews and not self.holder:
            raise InferenceError("conflict_error", "this lease has ended. Start again without `lease`")

    def is_ended_by(self, lease: Lease | None) -> bool:
        """Return whether there is a lease, and `lease`, if given, is that one."""
        return bool(self.holder) and (lease is None or lease.holder == self.holder)

    def like(self, name: str, serving: Policy | None) -> Policy | None:
        """Return a new policy like the one of this name that serves, or that comes back after a lease; None for other names."""
        known = (serving, *(self._before[-1:] if self.holder else ()))
        return next((policy.renew() for policy in known if policy is not None and policy.name == name), None)

    def keep_below(self, policy: Policy) -> None:
        """Have a policy to go back to, if there is none."""
        self._before = self._before or [policy]

    def go_back(self, scheduler: Scheduler, error: BaseException | None, now: float) -> list[Sequence]:
        """Switch to the policy before the one that raised an error, or whose lease has ended; return the sequences that leave.

        If that one fails at once, the one before it follows, and so on. The error of the first is raised.
        """
        failed, self.holder, self.ends_at = scheduler.policy, "", inf
        while self._before:
            policy = self._before.pop()
            # The policy of the start fails at once.
            scheduler.sharing.errors, scheduler.sharing.raises = [], not self._before
            try:
                left = scheduler.switch(policy, now)
            except BaseException as other:
                if error is not None:
                    self._note(failed, error, policy)
                failed, error = policy, other
            else:
                if error is not None:
                    self._note(failed, error, policy)
                return left
        assert error is not None  # a lease began with a switch
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
        self._log.error(
            "the policy %s failed%s: %s. The server went back to %s and kept every request",
            failed.name, where, words, policy.name,
        )  # fmt: skip


def _forgets(policy: Policy, sequences: list[Sequence], now: float) -> bool:
    """Have a policy that will come back forget the sequences that are here, which arrive again then; False if it fails."""
    try:
        for seq in sequences:
            policy.on_cancel(seq, now)
    except Exception:
        log.exception("the policy %s cannot be kept while another is leased; one like it will follow", policy.name)
        return False
    return True


def switch_problem(error: BaseException, policy: Policy) -> str:
    """Return why a policy that was to serve does not."""
    return (
        f"the policy {policy.name} fails on the requests that are here ({failure(error, policy)}), so the policy is "
        "unchanged. Correct its options, or use another policy"
    )
