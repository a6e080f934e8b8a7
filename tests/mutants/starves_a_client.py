"""Planted fault: never serves client b."""

from scheduling import policy


class Policy(policy.Policy):
    def order(self, waiting, now):
        return [seq for seq in waiting if seq.client != "b"]
