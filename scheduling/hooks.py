"""Which hooks a policy overrides, found out once, so that no step calls the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduling.iteration import Plan
from scheduling.policy import Policy
from scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks of one policy that do more than the defaults."""

    refuses: bool
    preempts: bool
    blocks: bool
    releases: bool
    on_token: Callable[[Sequence, float], None] | None
    on_step: Callable[[Plan, float], None] | None
    repeats: bool  # the plan of a step in which all decode can be used for the next one

    @classmethod
    def of(cls, policy: Policy) -> Hooks:
        def overrides(hook: str) -> bool:
            return getattr(type(policy), hook) is not getattr(Policy, hook)

        return cls(
            refuses=overrides("refuse"),
            preempts=overrides("preempt") and policy.preempts,
            blocks=overrides("blocked_by"),
            releases=overrides("release"),
            on_token=policy.on_token if overrides("on_token") else None,
            on_step=policy.on_step if overrides("on_step") else None,
            # The default `allocate_tokens`, like padding, gives each member one token when each has one pending.
            repeats=policy.padded or not overrides("allocate_tokens"),
        )
