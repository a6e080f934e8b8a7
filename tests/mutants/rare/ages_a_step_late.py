"""Planted fault: the guard of this order counts one unit of time less than it claims."""

from dataclasses import replace

from scheduling import policy


class Policy(policy.Policy):
    def __init__(self):
        self.claims = replace(self.claims, guard=26)

    def order(self, waiting, now):
        oldest = min(waiting, key=lambda seq: seq.arrived_at)
        first = [oldest] if now - oldest.arrived_at > 27 else []
        return [*first, *sorted((seq for seq in waiting if seq not in first), key=lambda seq: seq.max_tokens)]
