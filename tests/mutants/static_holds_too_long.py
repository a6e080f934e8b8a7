"""Planted fault: a static batch that runs once more after all members are done."""

from policies import static


class Policy(static.Policy):
    def __init__(self):
        self.was_done = False

    def release(self, running):
        leaving = super().release(running)
        self.was_done, was_done = bool(leaving), self.was_done
        return leaving if was_done else []
