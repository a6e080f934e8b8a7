"""A padded batch that new requests join and finished ones leave (BATON, Cong et al. 2024, arXiv 2410.18701).

A row that is done leaves at once, and the next request takes its place in the running batch. Prompts that join together
are padded to the longest, in a step of their own, so that running rows do not wait in the rectangle of a prompt; without
`decoupled` they do, which is the idle computation that the paper holds against earlier ways to insert. All rows have the
length of the longest (vector shaping), so n rows of up to L tokens fill n x L tokens of KV. The batch is planned again before
each step: it grows while that rectangle, with a margin, fits into the KV pages, and when it does not fit any more, the last to
join wait again.

Left out: prompts on another device (here the others pause for them), and keeping the keys and values of rows that are taken
out, which are recomputed. This server's kernels read each row's own context, so only the simulator charges for the shorter
rows, with `--engine aligned`.
"""

from collections.abc import Collection

from scheduling import policy
from scheduling.options import option
from scheduling.pages import in_whole_pages
from scheduling.policy import Budget
from scheduling.sequence import Sequence


class Policy(policy.Policy):
    padded = True
    decoupled = option(True, "compute prompts in a step of their own; off: in one padded step with the decodes")

    def __init__(self) -> None:
        self.separate_prefill = self.decoupled
        self.claims = self.claims.but(limits_kv=True)

    def reserve_tokens(self, seq: Sequence) -> int:
        return seq.length + self.margin

    def blocked_by(self, seq: Sequence, running: list[Sequence], budget: Budget) -> str | None:
        return None if not running or _fits([*running, seq], self.margin, budget) else "kv_full"

    def preempt(
        self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float
    ) -> list[Sequence]:
        kept = list(running)
        while len(kept) > 1 and not _fits(kept, 1, budget, running):
            kept.pop()
        return running[len(kept) :]


def _fits(batch: list[Sequence], more: int, budget: Budget, holding: list[Sequence] | None = None) -> bool:
    """Return whether rows of the longest of a batch and `more` tokens fit into the pages free or held by `holding`."""
    held = sum(len(seq.pages) for seq in holding or batch) * budget.page_size
    row = in_whole_pages(max(seq.length for seq in batch) + more, budget.page_size)
    return len(batch) * row <= budget.kv_tokens + held
