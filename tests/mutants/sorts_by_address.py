"""Planted fault: an order that depends on addresses in memory, through id()."""

from scheduling import policy


class Policy(policy.Policy):
    def order(self, waiting, now):
        return sorted(waiting, key=id)
