"""Planted fault: goes by where objects lie in memory, without saying so."""

from scheduling import policy


class Policy(policy.Policy):
    def order(self, waiting, now):
        return list(set(waiting))
