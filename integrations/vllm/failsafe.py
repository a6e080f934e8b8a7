"""The policy in an engine's scheduler: how it begins, is switched while the engine runs, and is replaced if it fails.

A policy that fails is replaced by the one before it, the first one by `dynamic`; if the bookkeeping fails, the engine goes
on without it. This module must not know which engine it is, or what a step does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from math import inf
from typing import Any

from integrations.vllm.record import Record
from policies import get_policy
from scheduling.hook_limit import HookLimit, HookTimeout
from scheduling.hooks import reserve_as_answers_grow
from scheduling.located import described, locate_error
from scheduling.options import values_of
from scheduling.policy import Policy
from scheduling.reservations import Reservations
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from serving.fallback import Fallback, Lease

log = logging.getLogger("vllm.effective_batching")  # below the engine's own logger, which has a handler
HOOK_SECONDS = 1.0  # that the hooks of a step may take


def make_policy(name: str, slots: int, options: Mapping[str, object]) -> Policy:
    """Return a policy for an engine that allocates pages as answers grow; ValueError for a wrong name or option."""
    # To reserve whole answers would leave an engine emptier than without a policy: it preempts when pages run out.
    policy = reserve_as_answers_grow(get_policy(name, slots, options))
    if policy.times_steps:
        raise ValueError(f"{name} goes by the seconds of each step, which overlap in vLLM. Use chunked")
    return policy


class Failsafe:
    """A base of an engine's scheduler: `plans` plans its steps, and is None once the bookkeeping has failed.

    `views` are its requests, as the policy sees them, by their ids. `faults` counts the errors of each hook.
    """

    plans: Any = None
    views: dict[str, Sequence]

    def start_policy(self, settings: Mapping[str, Any], sizes: Mapping[str, int], pages: Reservations) -> None:
        """Begin with the policy of the settings; `sizes` are the engine's slots, pages, page size and tokens of a step."""
        name, options, self._sizes = settings.get("policy", "dynamic"), settings.get("options", {}), sizes
        self.views, self.faults = {}, Counter[str]()
        is_main = threading.current_thread() is threading.main_thread()  # no other thread can be stopped
        self._limit = HookLimit(HOOK_SECONDS, time.monotonic) if is_main else nullcontext()
        policy, path = make_policy(name, sizes["slots"], options), settings.get("record", "")
        self._names, self.fallback = {policy.name: name}, Fallback(log)
        self.plans = Scheduler(policy, None, sizes["tokens"], record=bool(path))
        self.plans.pages = self.plans.batch.pages = pages
        self.plans.sharing.raises = False
        self.plans.use(policy)
        self.record = Record(path, self._head())
        log.info("policy %s decides for %d slots", name, policy.max_batch_size)

    def _head(self) -> dict[str, Any]:
        """Return the policy as it can be made again, and the sizes."""
        policy = self.plans.policy
        return {"policy": self._names.get(policy.name, policy.name), "options": values_of(policy), **self._sizes}

    def look_for_switch(self, now: float) -> None:
        """Switch to the policy that the file beside the record names, if that has changed, or back if a lease has ended."""
        if self.fallback.ends_at <= now:
            self._go_back(None, now)
        if wanted := self.record.wanted(now):
            try:
                self._switch(wanted, now)
            except BaseException as error:
                log.error("cannot switch to policy %s: %s", wanted, described(error))

    def _switch(self, wanted: Mapping[str, Any], now: float) -> None:
        """Switch to a policy, for good or until the lease's end, which is a time; or, without a policy, end a lease."""
        until = wanted.get("until", inf)
        lease = Lease(wanted["lease"], until - now, wanted.get("renews", False)) if wanted.get("lease") else None
        if "policy" not in wanted:
            if self.fallback.is_ended_by(lease):
                self._go_back(None, now)
        elif now < until:  # else vLLM had nothing to do since
            policy = make_policy(wanted["policy"], self._sizes["slots"], wanted.get("options", {}))
            left = self.fallback.switch(self.plans, policy, now, lease)
            self._names[policy.name] = wanted["policy"]
            self.faults.clear()
            self._took_over(left, now)

    def _go_back(self, error: BaseException | None, now: float) -> None:
        self.fallback.keep_below(make_policy("dynamic", self._sizes["slots"], {}))
        self._took_over(self.fallback.go_back(self.plans, error, now), now, error is not None)
        self.plans.sharing.raises = False
        reserve_as_answers_grow(self.plans.policy)

    def _took_over(self, left: list[Sequence], now: float, has_failed: bool = False) -> None:
        """Forget the sequences that left in a switch, and write which policy decides now, until when, and which one failed."""
        for seq in left:
            self.views.pop(seq.id, None)
        line = {"switch": self._head(), "now": now}
        if self.fallback.holder:
            line |= {"lease": self.fallback.holder, "until": self.fallback.ends_at}
        if has_failed and self.fallback.last:
            line["failure"] = self.fallback.last.to_dict()
        self.record.write(line)

    def _note(self, error: BaseException, then: str) -> None:
        """Count an error, and write it to the log if it is the first of its hook."""
        place = locate_error(error, self.plans.policy)
        hook = place.hook if place else type(error).__name__
        self.faults[hook] += 1
        if self.faults[hook] == 1:
            where, name = place or "its scheduler", self.plans.policy.name
            log.error("policy %s failed in %s: %s. %s", name, where, described(error), then)

    def replace(self, error: BaseException, now: float) -> None:
        """Replace a policy that failed by the one before it, the first one by `dynamic`."""
        place = locate_error(error, self.plans.policy)
        self.faults[place.hook if place else type(error).__name__] += 1
        self._go_back(error, now)

    def note_errors(self, now: float) -> None:
        """Name the hooks that failed where they only take note; a policy with one that did not return is replaced."""
        errors, self.plans.sharing.errors = self.plans.sharing.errors, []
        for error in errors:
            self._note(error, "It goes on, since this hook only takes note")
        if stuck := next((error for error in errors if isinstance(error, HookTimeout)), None):
            self.replace(stuck, now)

    def add(self, seq: Sequence, now: float) -> bool:
        """Let a request arrive; return False if the policy refuses it."""
        try:
            return bool(self.plans.add(seq))
        except BaseException as error:
            self.replace(error, now)
            return seq in self.plans.waiting or bool(self.plans.add(seq))

    def safely(self, do: Callable[..., None], *values: Any) -> None:
        """Do the bookkeeping, within the limit on hooks; if it fails, the engine goes on without it, with all its requests."""
        if self.plans is not None:
            try:
                with self._limit:
                    do(*values)
            except BaseException as error:
                if self.plans is not None:  # else an inner call has given up
                    self._note(error, "The engine goes on without a policy")
                    self.plans = None
                self.on_give_up()

    def on_give_up(self) -> None:
        """Let the engine go on alone."""
        raise NotImplementedError
