"""Planted fault: after answers of one and of two tokens to such prompts, a third kind of request is never served."""

from scheduling import policy


class Policy(policy.Policy):
    def __init__(self):
        self.last = []

    def on_finish(self, seq, now):
        self.last = [*self.last[-1:], (len(seq.prompt_ids), seq.max_tokens)]

    def order(self, waiting, now):
        if self.last != [(1, 1), (2, 2)]:
            return waiting
        return [seq for seq in waiting if (len(seq.prompt_ids), seq.max_tokens) != (1, 2)]
