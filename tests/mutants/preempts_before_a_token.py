"""Planted fault: preempts the requests whose prompts are not computed yet."""

from scheduling import policy


class Policy(policy.Policy):
    def preempt(self, waiting, running, budget, now):
        return [seq for seq in running if not seq.output_ids]
