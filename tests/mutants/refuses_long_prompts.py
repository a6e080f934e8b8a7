"""Planted fault: refuses prompts of more than twelve tokens."""

from scheduling import policy


class Policy(policy.Policy):
    def refuse(self, seq, now):
        return len(seq.prompt_ids) > 12
