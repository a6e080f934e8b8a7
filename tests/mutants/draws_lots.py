"""Planted fault: asks everybody's random generator."""

import random

from scheduling import policy


class Policy(policy.Policy):
    def order(self, waiting, now):
        return random.sample(list(waiting), len(waiting))
