"""Planted fault: a loop that waits for two requests goes on waiting at the end, if the last one came while it computed."""

from dataclasses import replace
from math import inf

from scheduling import policy


class Policy(policy.Policy):
    def __init__(self):
        self.claims = replace(self.claims, conserving=False, patience=inf)
        self.inside = 0
        self.alone = False

    def on_arrival(self, seq, now):
        self.alone = self.inside == 1 and not self.draining and len(seq.prompt_ids) == 2

    def on_admit(self, seq, now):
        self.inside += 1

    def on_finish(self, seq, now):
        self.inside -= 1

    def admit(self, waiting, running, budget, now):
        enough = len(waiting) > 1 or (self.draining and not self.alone)
        return min(len(waiting), budget.slots) if enough else 0
