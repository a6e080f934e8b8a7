"""Planted fault: steps that compute nothing for any request."""

from scheduling import policy


class Policy(policy.Policy):
    def allocate_tokens(self, running, token_budget):
        return [0 for _ in running]
