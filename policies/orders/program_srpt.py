"""Shortest remaining program first: an oracle, since only a simulator knows future calls."""

from policies.orders._programs import Programs
from scheduling.sequence import Sequence


class Order(Programs):
    def key(self, seq: Sequence, now: float) -> float:
        prompt, answer = seq.program_tokens if any(seq.program_tokens) else (len(seq.prompt_ids), seq.max_tokens)
        return self.w_p * prompt + self.w_q * answer - self.account(seq) - self.service(seq)
