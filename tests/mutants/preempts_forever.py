"""Planted fault: preempts all requests, again and again."""

from scheduling import policy


class Policy(policy.Policy):
    def preempt(self, waiting, running, budget, now):
        return [seq for seq in running if len(seq.output_ids) > 1]
