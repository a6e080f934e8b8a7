"""Planted fault: an order that reads the time of day."""

from scheduling import policy


class Policy(policy.Policy):
    def order(self, waiting, now):
        from time import time

        return sorted(waiting, key=lambda seq: time() - seq.arrived_at)
