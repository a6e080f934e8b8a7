"""The policy in an engine's scheduler: how it begins, is switched while the engine runs, and is replaced if it fails.

A policy that fails is replaced by `dynamic`; if the bookkeeping fails, the engine goes on without it. This module must not
know which engine it is, or what a step does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from integrations.vllm.record import Record
from policies import get_policy
from scheduling.hook_limit import HookLimit, HookTimeout
from scheduling.hooks import reserve_as_answers_grow
from scheduling.located import described, locate_error
from scheduling.policy import Policy
from scheduling.reservations import Reservations
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence

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
        self._name, self._options, self._sizes = settings.get("policy", "dynamic"), settings.get("options", {}), sizes
        self.views, self.faults = {}, Counter[str]()
        is_main = threading.current_thread() is threading.main_thread()  # no other thread can be stopped
        self._limit = HookLimit(HOOK_SECONDS, time.monotonic) if is_main else nullcontext()
        policy, path = make_policy(self._name, sizes["slots"], self._options), settings.get("record", "")
        self.plans = Scheduler(policy, None, sizes["tokens"], record=bool(path))
        self.plans.pages = self.plans.batch.pages = pages
        self.plans.sharing.raises = False
        self.plans.use(policy)
        self.record = Record(path, self._head())
        log.info("policy %s decides for %d slots", self._name, policy.max_batch_size)

    def _head(self) -> dict[str, Any]:
        return {"policy": self._name, "options": self._options, **self._sizes}

    def look_for_switch(self, now: float) -> None:
        """Switch to the policy that the file beside the record names, if that has changed."""
        if wanted := self.record.wanted(now):
            try:
                self._switch(wanted["policy"], wanted.get("options", {}), now)
                self.faults.clear()
            except BaseException as error:
                log.error("cannot switch to policy %s: %s", wanted, described(error))

    def _switch(self, name: str, options: Mapping[str, object], now: float) -> None:
        for seq in self.plans.switch(make_policy(name, self._sizes["slots"], options), now):
            self.views.pop(seq.id, None)
        self._name, self._options = name, dict(options)
        self.record.write({"switch": self._head(), "now": now})

    def _note(self, error: BaseException, then: str) -> None:
        """Count an error, and write it to the log if it is the first of its hook."""
        place = locate_error(error, self.plans.policy)
        hook = place.hook if place else type(error).__name__
        self.faults[hook] += 1
        if self.faults[hook] == 1:
            where, name = place or "its scheduler", self.plans.policy.name
            log.error("policy %s failed in %s: %s. %s", name, where, described(error), then)

    def replace(self, error: BaseException, now: float) -> None:
        """Replace a policy that failed by `dynamic`."""
        self._note(error, "dynamic takes its place")
        self._switch("dynamic", {}, now)

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
