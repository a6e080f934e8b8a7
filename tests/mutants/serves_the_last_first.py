"""Planted fault: last come, first served, with the claim that at most 20 tokens pass a request."""

from dataclasses import replace

from scheduling import policy


class Policy(policy.Policy):
    def __init__(self, max_batch_size, **options):
        super().__init__(max_batch_size, **options)
        self.claims = replace(self.claims, overtaking_tokens=20)

    def order(self, waiting, now):
        return sorted(waiting, key=lambda seq: -seq.arrived_at)
