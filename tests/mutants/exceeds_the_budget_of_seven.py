"""Planted fault: with seven running, whole prompts are computed, whatever a step may compute."""

from scheduling import policy


class Policy(policy.Policy):
    def allocate_tokens(self, running, token_budget):
        if len(running) == 7:
            return [seq.pending for seq in running]
        return super().allocate_tokens(running, token_budget)
