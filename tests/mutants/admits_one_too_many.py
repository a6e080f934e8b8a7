"""Planted fault: admits one request more than there are slots."""

from scheduling import policy


class Policy(policy.Policy):
    def admit(self, waiting, running, budget, now):
        return min(len(waiting), budget.slots + 1)
