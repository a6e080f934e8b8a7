"""Planted fault: names the same request twice."""

from scheduling import policy


class Policy(policy.Policy):
    def admit(self, waiting, running, budget, now):
        return budget.slots

    def order(self, waiting, now):
        return [seq for seq in waiting for _ in range(2)]
