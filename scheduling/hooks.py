"""Which hooks a policy overrides, found out once, so that no step calls the others."""

from __future__ import annotations

from scheduling.policy import Policy


def overrides(policy: Policy, hook: str) -> bool:
    """Return whether a policy has a hook of its own."""
    return getattr(type(policy), hook) is not getattr(Policy, hook)


def reserve_as_answers_grow(policy: Policy) -> Policy:
    """Let a policy without a `reserve_tokens` of its own reserve a margin, not whole answers, and return it."""
    if not overrides(policy, "reserve_tokens") and not policy.padded and not policy.closed:
        policy.reserve_tokens = lambda seq: seq.length + policy.margin  # type: ignore[method-assign]
    return policy


class Hooks:
    """The hooks of one policy that do more than the defaults."""

    def __init__(self, policy: Policy) -> None:
        self.refuses = overrides(policy, "refuse")
        self.expires = overrides(policy, "expires_at")
        self.preempts = overrides(policy, "preempt") and policy.preempts
        self.blocks = overrides(policy, "blocked_by")
        self.overrides_release = overrides(policy, "release")
        self.keeps = overrides(policy, "keep_until")
        self.on_token = policy.on_token if overrides(policy, "on_token") else None
        self.on_step = policy.on_step if overrides(policy, "on_step") else None
        # The plan of a step in which all decode can be used for the next one: the default `allocate_tokens`, like padding,
        # gives each member one token when each has one pending.
        self.repeats = policy.padded or not overrides(policy, "allocate_tokens")
