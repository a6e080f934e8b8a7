"""Planted fault: a queue of its own that is not told of cancellations."""

from scheduling import policy


class Policy(policy.Policy):
    def __init__(self):
        self.queue = []

    def on_arrival(self, seq, now):
        self.queue.append(seq)

    def on_preempt(self, seq, now):
        self.queue.insert(0, seq)

    def on_admit(self, seq, now):
        self.queue.remove(seq)

    def order(self, waiting, now):
        return list(self.queue)
