"""Planted fault: lets who is done go twice, with their pages."""

from scheduling import policy


class Policy(policy.Policy):
    def release(self, running):
        return super().release(running) * 2
