"""Planted fault: claims that no slot stays empty, and leaves one empty."""

from dataclasses import replace

from scheduling import policy


class Policy(policy.Policy):
    def __init__(self):
        self.claims = replace(self.claims, conserving=True)

    def admit(self, waiting, running, budget, now):
        return min(len(waiting), budget.slots if not running else budget.slots - 1)
