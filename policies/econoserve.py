"""Answers run in groups of equal predicted length, with KV memory separate from prompts (EconoServe, arXiv 2411.06364).

(Shen and Sen 2024; EcoServe in its first version.) A request joins with KV for its prompt alone, out of a `reserved` share, so
that prompts can fill each step up to `max_batched_tokens` (the paper's target forward size). With its first token it waits for its
group, whose members are predicted to generate equally many tokens, so that they begin and end together. Each counts with the
KV of its whole predicted answer and `padding` more. With `pipelining`, an answer may count on KV that another needs only after
it is done: the paper lends halves of halves; pages need not be contiguous, so here the peak over time decides, as in `lightllm`.
Groups go by deadline in ranges of `slo_range` seconds, then by the KV that they hold, then by length, most first. No group
overtakes one of an earlier range that does not fit.

Answers longer than predicted use up the reserved share, then the last to join is preempted. Left out: the order of prompts,
which is that of the loop's order (`econoserve+edf`), and the time that scheduling by groups saves, which is not modeled.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from math import ceil

from policies.lightllm import peak
from policies.orders._predictions import Predicting
from scheduling.options import option
from scheduling.pages import in_whole_pages
from scheduling.policy import Budget
from scheduling.sequence import Sequence


class Policy(Predicting):
    max_batched_tokens = option(512, "maximum tokens per step; prompts fill it up", low=1)
    reserved = option(
        0.05, "share of the KV memory for prompts and for answers longer than predicted", low=0.0, high=1.0
    )
    padding = option(0.1, "share added to each predicted length", low=0.0, high=10.0)
    pipelining = option(True, "let an answer use KV memory that others need only after it is done")
    slo = option(10.0, "deadline in seconds for requests that set none", low=0.0)
    slo_range = option(1.0, "seconds between deadlines that count as equal", low=0.001)

    def __init__(self) -> None:
        self.claims = self.claims.but(limits_kv=True, uses=(*self.claims.uses, "deadline"))
        self._kv_tokens = 1 << 60  # of all pages
        self._begun: set[Sequence] = set()

    def reserve_tokens(self, seq: Sequence) -> int:
        return seq.length + 1

    def blocked_by(self, seq: Sequence, running: list[Sequence], budget: Budget) -> str | None:
        self._kv_tokens = budget.kv_tokens + sum(len(other.pages) for other in running) * self.page_size
        begun, apart = self._parted(running, budget.tokens)
        if len(begun) + sum(other.pending for other in apart if other.is_prefilling) >= budget.tokens:
            return "token_budget"
        held = sum(map(self._size, [*apart, seq]))
        over = bool(apart) and held > self.reserved * self._kv_tokens
        return "kv_full" if running and (over or self._needed(begun) + held > self._kv_tokens) else None

    def allocate_tokens(self, running: list[Sequence], token_budget: int) -> list[int]:
        left = token_budget - len(self._parted(running, token_budget)[0])
        counts = []
        for seq in running:
            count = min(seq.pending, left) if seq.is_prefilling else int(seq in self._begun)
            left -= count * seq.is_prefilling
            counts.append(count)
        return counts

    def _parted(self, running: list[Sequence], most: int) -> tuple[list[Sequence], list[Sequence]]:
        """Let up to `most` requests generate, as far as the KV suffices; return these and the others."""
        begun, apart = [s for s in running if s in self._begun], [s for s in running if s not in self._begun]
        for group in self._ranges([seq for seq in apart if not seq.is_prefilling]):
            for seq in group:
                others = sum(map(self._size, apart)) - self._size(seq)
                limit = self._kv_tokens - max(others, self.reserved * self._kv_tokens)
                alone = not begun and not any(other.is_prefilling for other in apart)
                if alone or (len(begun) < most and self._needed([*begun, seq]) <= limit):
                    begun.append(seq)
                    self._begun.add(seq)
                    apart.remove(seq)
            if not self._begun.issuperset(group):
                break
        return begun, apart

    def _ranges(self, ready: list[Sequence]) -> Iterator[list[Sequence]]:
        """Yield the requests by ranges of deadlines, in each of them one group after the other."""
        due = {s: s.arrived_at + self.slo if s.deadline is None else s.deadline for s in ready}
        first = min(due.values(), default=0.0)
        groups: dict[tuple[int, int], list[Sequence]] = {}
        for seq in ready:
            groups.setdefault((int((due[seq] - first) // self.slo_range), -self._rest(seq)), []).append(seq)
        order = sorted(groups, key=lambda key: (key[0], -sum(map(self._size, groups[key])), key[1]))
        for _, keys in groupby(order, key=lambda key: key[0]):
            yield [seq for key in keys for seq in groups[key]]

    def _size(self, seq: Sequence) -> int:
        """Return the KV tokens that a request needs for its next token, in whole pages."""
        return in_whole_pages(seq.length + 1, self.page_size)

    def _needed(self, begun: Iterable[Sequence]) -> int:
        """Return the most KV tokens that these requests are predicted to hold; the last page of each may be empty."""
        parts = [(self._rest(seq), seq.length + self.page_size) for seq in begun]
        return peak(parts) if self.pipelining else sum(map(sum, parts))

    def _rest(self, seq: Sequence) -> int:
        """Return how many more tokens a request is predicted to generate, one at least."""
        return max(1, ceil(self.predict(seq) * (1 + self.padding)) - len(seq.output_ids))

    def on_admit(self, seq: Sequence, now: float) -> None:
        super().on_admit(seq, now)
        self._begun.discard(seq)  # it may have been preempted

    def on_finish(self, seq: Sequence, now: float) -> None:
        super().on_finish(seq, now)
        self._begun.discard(seq)
