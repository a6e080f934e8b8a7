"""Planted fault: the last request in the queue never joins."""

from scheduling import policy


class Policy(policy.Policy):
    def admit(self, waiting, running, budget, now):
        return min(len(waiting) - 1, budget.slots)
