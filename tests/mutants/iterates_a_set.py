"""Planted fault: an order that depends on addresses in memory, through a set."""

from scheduling import policy


class Policy(policy.Policy):
    def order(self, waiting, now):
        return list(set(waiting))
