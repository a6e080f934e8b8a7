"""Which hooks a policy overrides, found out once, so that no step calls the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduling.iteration import Plan
from scheduling.policy import Policy
from scheduling.sequence import Sequence


def overrides(policy: Policy, hook: str) -> bool:
    """Return whether a policy has a hook of its own."""
    return getattr(type(policy), hook) is not getattr(Policy, hook)


def reserve_as_answers_grow(policy: Policy) -> Policy:
    """Let a policy without a `reserve_tokens` of its own reserve a margin, not whole answers, and return it."""
    if not overrides(policy, "reserve_tokens") and not policy.padded and not policy.closed:
        policy.reserve_tokens = lambda seq: seq.length + policy.margin  # type: ignore[method-assign]
    return policy


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks of one policy that do more than the defaults."""

    refuses: bool
    expires: bool
    preempts: bool
    blocks: bool
    overrides_release: bool
    keeps: bool
    on_token: Callable[[Sequence, float], None] | None
    on_step: Callable[[Plan, float], None] | None
    repeats: bool  # the plan of a step in which all decode can be used for the next one

    @classmethod
    def of(cls, policy: Policy) -> Hooks:
        return cls(
            refuses=overrides(policy, "refuse"),
            expires=overrides(policy, "expires_at"),
            preempts=overrides(policy, "preempt") and policy.preempts,
            blocks=overrides(policy, "blocked_by"),
            overrides_release=overrides(policy, "release"),
            keeps=overrides(policy, "keep_until"),
            on_token=policy.on_token if overrides(policy, "on_token") else None,
            on_step=policy.on_step if overrides(policy, "on_step") else None,
            # The default `allocate_tokens`, like padding, gives each member one token when each has one pending.
            repeats=policy.padded or not overrides(policy, "allocate_tokens"),
        )
