"""Planted fault: of two requests that arrive in the instant in which another one leaves, the second is never served."""

from scheduling import policy


class Policy(policy.Policy):
    def __init__(self):
        self.left_at, self.since = -1.0, []

    def on_finish(self, seq, now):
        self.left_at, self.since = now, []

    def on_arrival(self, seq, now):
        self.since = [*self.since, seq] if now == self.left_at else []

    def order(self, waiting, now):
        kinds = [(len(seq.prompt_ids), seq.max_tokens) for seq in self.since]
        return [seq for seq in waiting if kinds != [(2, 1), (1, 2)] or seq is not self.since[1]]
