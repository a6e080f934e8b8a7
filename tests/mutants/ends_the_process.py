"""Planted fault: ends the process at the fifth token."""

from scheduling import policy


class Policy(policy.Policy):
    def on_token(self, seq, now):
        if len(seq.output_ids) == 5:
            raise SystemExit
