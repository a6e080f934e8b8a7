"""Planted fault: releases finished requests twice, with their pages."""

from scheduling import policy


class Policy(policy.Policy):
    def release(self, running):
        return super().release(running) * 2
