"""Planted fault: a window whose deadline is too late."""

from policies import window


class Policy(window.Policy):
    def deadline(self, waiting, now):
        return super().deadline(waiting, now) + self.delay
