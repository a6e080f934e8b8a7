"""Shortest remaining program first: an oracle, since only a simulator knows future calls."""

from policies.orders._programs import Programs
from scheduling.sequence import Sequence


class Order(Programs):
    def key(self, seq: Sequence, now: float) -> float:
        if not any(seq.program_tokens):  # on a server: the request is all that is known of its program
            return self.w_p * len(seq.prompt_ids) + self.w_q * seq.max_tokens - self.service(seq)
        prompt, answer = seq.program_tokens
        return self.w_p * prompt + self.w_q * answer - self.account(seq) - self.service(seq)
