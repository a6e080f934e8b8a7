"""The policy in an engine's scheduler: how it begins, is switched while the engine runs, and is replaced if it fails.

A policy that fails is replaced by `dynamic`; if the bookkeeping fails, the engine goes on without it. This module must not
know which engine it is, or what a step does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engines.guard import Guard, log, make_policy
from engines.record import Record
from scheduling.hook_limit import HookTimeout
from scheduling.located import described
from scheduling.reservations import Reservations
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence


class Failsafe:
    """A base of an engine's scheduler: `plans` plans its steps, and is None once the bookkeeping has failed.

    `views` are its requests, as the policy sees them, by their ids.
    """

    plans: Any = None
    views: dict[str, Sequence]

    def start_policy(self, settings: Mapping[str, Any], sizes: Mapping[str, int], pages: Reservations) -> None:
        """Begin with the policy of the settings; `sizes` are the engine's slots, pages, page size and tokens of a step."""
        self._name, self._options, self._sizes = settings.get("policy", "dynamic"), settings.get("options", {}), sizes
        self.views, self._guard = {}, Guard()
        policy, path = make_policy(self._name, sizes["slots"], self._options), settings.get("record", "")
        self.plans = Scheduler(policy, None, sizes["tokens"], record=bool(path))
        self.plans.pages = self.plans.batch.pages = pages
        self.plans.sharing.errors = []
        self.plans.use(policy)
        self.record = Record(path, self._head())
        log.info("policy %s decides for %d slots", self._name, policy.max_batch_size)

    def on_give_up(self) -> None:
        """Let the engine go on alone."""
        raise NotImplementedError

    def _head(self) -> dict[str, Any]:
        return {"policy": self._name, "options": self._options, **self._sizes}

    def look_for_switch(self, now: float) -> None:
        """Switch to the policy that the file beside the record names, if that has changed."""
        if wanted := self.record.wanted(now):
            try:
                self._switch(wanted["policy"], wanted.get("options", {}), now)
                self._guard.faults.clear()
            except BaseException as error:
                log.error("cannot switch to policy %s: %s", wanted, described(error))

    def _switch(self, name: str, options: Mapping[str, object], now: float) -> None:
        for seq in self.plans.switch(make_policy(name, self._sizes["slots"], options), now):
            self.views.pop(seq.id, None)
        self._name, self._options = name, dict(options)
        self.record.write({"switch": self._head(), "before": self.plans.number + 1, "now": now})

    def replace(self, error: BaseException, now: float) -> None:
        """Replace a policy that failed by `dynamic`."""
        self._guard.name(error, self.plans.policy, "dynamic takes its place")
        self._switch("dynamic", {}, now)

    def safely(self, do: Callable[..., None], *values: Any) -> None:
        """Do the bookkeeping; if that fails, the engine goes on without it, with all its requests."""
        if self.plans is not None:
            try:
                with self._guard.limited():
                    do(*values)
            except BaseException as error:
                if self.plans is not None:  # else an inner call has given up
                    self._guard.name(error, self.plans.policy, "The engine goes on without a policy")
                    self.plans = None
                self.on_give_up()

    def note_errors(self, now: float) -> None:
        """Name the hooks that failed where they only take note; a policy with one that did not return is replaced."""
        errors, self.plans.sharing.errors = self.plans.sharing.errors, []
        for error in errors:
            self._guard.name(error, self.plans.policy, "It goes on, since this hook only takes note")
        if stuck := next((error for error in errors if isinstance(error, HookTimeout)), None):
            self.replace(stuck, now)

    def add(self, seq: Sequence, now: float) -> bool:
        """Let a request arrive; return False if the policy refuses it."""
        try:
            return bool(self.plans.add(seq))
        except BaseException as error:
            self.replace(error, now)
            return seq in self.plans.waiting or bool(self.plans.add(seq))
