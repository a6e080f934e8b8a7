"""Planted fault: a victim's last page is never given back."""

from scheduling import policy


class Policy(policy.Policy):
    def victim(self, running, now):
        seq = super().victim(running, now)
        seq.pages.pop()
        return seq
