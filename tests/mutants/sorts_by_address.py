"""Planted fault: goes by where objects lie in memory, and says so."""

from scheduling import policy


class Policy(policy.Policy):
    def order(self, waiting, now):
        return sorted(waiting, key=id)
