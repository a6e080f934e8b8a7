"""Planted fault: one kind of request does not join while one of another kind is at its last token."""

from scheduling import policy


class Policy(policy.Policy):
    def blocked_by(self, seq, running, budget):
        kinds = [(len(s.prompt_ids), s.max_tokens, len(s.output_ids)) for s in running]
        rare = kinds == [(2, 2, 1)] and (len(seq.prompt_ids), seq.max_tokens) == (1, 1)
        return "slots_full" if rare and seq.arrived_at > running[0].arrived_at else None
