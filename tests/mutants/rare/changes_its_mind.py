"""Planted fault: first come, first served, except that every third call of order() swaps two kinds of requests."""

from dataclasses import replace

from scheduling import policy


class Policy(policy.Policy):
    def __init__(self):
        self.claims = replace(self.claims, overtakes=0)
        self.calls = 0

    def order(self, waiting, now):
        self.calls = (self.calls + 1) % 3
        kinds = [(len(seq.prompt_ids), seq.max_tokens) for seq in waiting]
        return [*waiting][::-1] if self.calls == 0 and kinds == [(1, 2), (2, 2)] else waiting
