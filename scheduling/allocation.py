"""The tokens of each sequence in the next step, checked against what it has left."""

from __future__ import annotations

from typing import NamedTuple

from scheduling.policy import Policy, PolicyError
from scheduling.reservations import ENDLESS
from scheduling.sequence import Sequence


class Allocation(NamedTuple):
    """The sequences that compute, their numbers of tokens, those that are held and those that pause."""

    sequences: list[Sequence]
    counts: list[int]
    held: list[Sequence]
    paused: list[Sequence]


def allocate(policy: Policy, running: list[Sequence], token_budget: int) -> Allocation:
    """Ask the policy for the tokens of each running sequence; raise PolicyError if they cannot be computed."""
    live = [seq for seq in running if seq.finish_reason is None]
    held = [seq for seq in running if seq.finish_reason is not None] if len(live) < len(running) else []
    if policy.padded and not policy.separate_prefill:
        return Allocation(live, [seq.pending for seq in live], held, [])
    counts = policy.allocate_tokens(live, ENDLESS if policy.padded else token_budget)
    if len(counts) != len(live):
        raise PolicyError(f"allocate_tokens: {len(counts)} numbers for {len(live)} running sequences")
    if type(policy).allocate_tokens is not Policy.allocate_tokens:
        for seq, count in zip(live, counts):
            if not 0 <= count <= seq.pending:
                raise PolicyError(f"allocate_tokens: {count} tokens for {seq.id}, which has {seq.pending} left")
    if all(counts):
        return Allocation(live, counts, held, [])
    paused = [seq for seq, count in zip(live, counts) if not count]
    live = [seq for seq, count in zip(live, counts) if count]
    if not live and not held:
        raise PolicyError("allocate_tokens: no running request computes a token")
    return Allocation(live, [count for count in counts if count], held, paused)
