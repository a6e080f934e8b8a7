"""Planted fault: turns prompts of more than twelve tokens away."""

from scheduling import policy


class Policy(policy.Policy):
    def refuse(self, seq, now):
        return len(seq.prompt_ids) > 12
