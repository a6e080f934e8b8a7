"""Dynamic batching (Orca, OSDI 2022): requests join and leave between any two iterations, oldest first.

A prompt is computed in the same step as the others' next tokens. Only slots and KV pages limit the batch. With
`reserve=prompt`, a request joins with pages for its prompt and a margin, and takes more as it grows (vLLM, SOSP 2023);
when none is free, the last to join is preempted.
"""

from scheduling import policy
from scheduling.options import option
from scheduling.sequence import Sequence


class Policy(policy.Policy):
    reserve = option(
        "all",
        "KV pages at admission; all: for the whole answer, if max_tokens is set; prompt: for the prompt and 64 tokens",
        choices=("all", "prompt"),
    )

    def reserve_tokens(self, seq: Sequence) -> int:
        return seq.length + self.margin if self.reserve == "prompt" else super().reserve_tokens(seq)
