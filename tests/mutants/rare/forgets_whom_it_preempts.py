"""Planted fault: a request that one kind of request preempts from beside another kind is not in the queue again."""

from scheduling import policy


class Policy(policy.Policy):
    def __init__(self):
        self.queue, self.forgotten = [], None

    def on_arrival(self, seq, now):
        self.queue.append(seq)

    def on_admit(self, seq, now):
        self.queue.remove(seq)

    def on_cancel(self, seq, now):
        self.queue = [other for other in self.queue if other is not seq]

    def preempt(self, waiting, running, budget, now):
        kinds = [(len(seq.prompt_ids), seq.max_tokens) for seq in [*running, *waiting]]
        if len(running) < 2 or kinds != [(1, 2), (2, 2), (1, 1)] or not running[1].has_progressed:
            return []
        self.forgotten = running[1]
        return [self.forgotten]

    def on_preempt(self, seq, now):
        if seq is not self.forgotten:
            self.queue.insert(0, seq)

    def order(self, waiting, now):
        return list(self.queue)
