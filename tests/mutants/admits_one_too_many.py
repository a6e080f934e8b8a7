"""Planted fault: lets B + 1 join."""

from scheduling import policy


class Policy(policy.Policy):
    def admit(self, waiting, running, room, now):
        return min(len(waiting), room.slots + 1)
