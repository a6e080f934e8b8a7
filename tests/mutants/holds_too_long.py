"""Planted fault: a finished request keeps its slot for one more iteration."""

from scheduling import policy


class Policy(policy.Policy):
    def __init__(self):
        self.done = []

    def release(self, running):
        leaving = [seq for seq in self.done if seq in running]
        self.done = [seq for seq in running if seq.is_finished]
        return leaving
