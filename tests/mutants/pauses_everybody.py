"""Planted fault: every other step computes nothing for anybody."""

from scheduling import policy


class Policy(policy.Policy):
    def allocate_tokens(self, running, token_budget):
        return [0 for _ in running]
