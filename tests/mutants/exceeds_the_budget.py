"""Planted fault: computes whole prompts, whatever the token budget."""

from scheduling import policy


class Policy(policy.Policy):
    def allocate_tokens(self, running, token_budget):
        return [seq.pending for seq in running]
