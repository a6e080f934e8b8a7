"""Planted fault: after a hundred admissions, passes over the first request in the queue for good."""

from scheduling import policy


class Policy(policy.Policy):
    def __init__(self):
        self.joins = 0
        self.lost = None

    def on_admit(self, seq, now):
        self.joins += 1

    def order(self, waiting, now):
        if self.joins >= 100 and self.lost is None:
            self.lost = next(iter(waiting))
        return [seq for seq in waiting if seq is not self.lost]
