"""Planted fault: a window that admits no request when it is woken."""

from policies import window


class Policy(window.Policy):
    def admit(self, waiting, running, budget, now):
        return super().admit(waiting, running, budget, now - 1)
