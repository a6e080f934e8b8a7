"""Planted fault: every other step computes nothing for anybody."""

from scheduling import policy


class Policy(policy.Policy):
    def share(self, running, budget):
        return [0 for _ in running]
