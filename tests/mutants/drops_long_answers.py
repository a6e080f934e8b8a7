"""Planted fault: a request with a long answer never joins."""

from scheduling import policy


class Policy(policy.Policy):
    def order(self, waiting, now):
        return [seq for seq in waiting if seq.max_tokens < 700]
