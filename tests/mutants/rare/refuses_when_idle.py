"""Planted fault: an idle machine refuses the third request if it is like the second one."""

from scheduling import policy


class Policy(policy.Policy):
    def __init__(self):
        self.kinds, self.inside = [], 0

    def refuse(self, seq, now):
        kind = (len(seq.prompt_ids), seq.max_tokens)
        refused = self.inside == 0 and self.kinds == [(1, 1), kind]
        self.inside += not refused
        self.kinds.append(kind)
        return refused

    def on_finish(self, seq, now):
        self.inside -= 1
