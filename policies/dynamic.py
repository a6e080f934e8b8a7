"""Dynamic batching (Orca, OSDI 2022): requests join and leave between any two iterations, oldest first.

A prompt is computed in the same step as the others' next tokens. Only slots and KV pages limit the batch.
"""

from scheduling import policy


class Policy(policy.Policy):
    """The default of every hook."""
