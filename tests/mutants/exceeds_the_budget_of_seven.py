"""Planted fault: with seven requests running, computes whole prompts, whatever the token budget."""

from scheduling import policy


class Policy(policy.Policy):
    def allocate_tokens(self, running, token_budget):
        if len(running) == 7:
            return [seq.pending for seq in running]
        return super().allocate_tokens(running, token_budget)
