"""Planted fault: lets B + 1 join."""

from scheduling import policy


class Policy(policy.Policy):
    def admit(self, waiting, running, budget, now):
        return min(len(waiting), budget.slots + 1)
