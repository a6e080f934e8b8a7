"""Planted fault: an answer of one token keeps its slot for a step if the other one finishes in the same step."""

from scheduling import policy


class Policy(policy.Policy):
    def release(self, running):
        finished = [seq for seq in running if seq.is_finished]
        both = len(finished) == len(running) == 2 and finished[0].max_tokens > 1
        late = both and finished[1].max_tokens == 1 and finished[1].first_token_at == finished[0].last_token_at
        return finished[:1] if late and len(finished[1].prompt_ids) == 2 == finished[0].max_tokens else finished
