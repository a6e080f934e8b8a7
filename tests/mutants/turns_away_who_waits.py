"""Planted fault: turns requests away that have waited, and does not claim it."""

from scheduling import policy


class Policy(policy.Policy):
    def expires_at(self, seq):
        return seq.arrived_at + 30
