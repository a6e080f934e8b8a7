"""Dynamic batching (Orca, OSDI 2022): sequences join and leave between any two iterations, oldest first.

A prompt is computed in the same step as the others' next tokens. Only slots and KV pages limit who joins.
"""

from scheduling import policy


class Policy(policy.Policy):
    """The defaults of every hook are this policy."""
