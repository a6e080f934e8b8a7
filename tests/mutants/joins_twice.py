"""Planted fault: names the same sequence twice."""

from scheduling import policy


class Policy(policy.Policy):
    def admit(self, waiting, running, room, now):
        return room.slots

    def order(self, waiting, now):
        return [seq for seq in waiting for _ in range(2)]
