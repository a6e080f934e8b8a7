"""Planted fault: claims to refuse only those who would be late, and refuses those who would be on time by a little."""

from policies.orders import admission_control


class Policy(admission_control.Order):
    def refuse(self, seq, now):
        return None not in (seq.deadline, seq.estimate) and seq.estimate.ends_at > seq.deadline - 40
