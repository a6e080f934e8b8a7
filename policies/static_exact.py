"""Static batching of identical shapes: what the original (lievan/effective-batching) calls static.

An idle engine empties the queue, groups it by (prompt length, requested tokens) in order of first appearance, cuts the
groups at the slots (the original: 128), and runs them one after the other before it looks at the queue again. Nothing
is padded and no slot is held; with different lengths it serves one request at a time.
"""

from collections.abc import Collection, Iterable

from policies import static
from scheduling.policy import Budget
from scheduling.sequence import Sequence


class Policy(static.Policy):
    def __init__(self) -> None:
        self.claims = self.claims.without_order()
        self._groups: list[list[Sequence]] = []  # the last is the next to run

    def admit(self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float) -> int:
        if running:
            return 0
        while self._groups:
            self._groups[-1] = [seq for seq in self._groups[-1] if seq.state == "waiting"]
            if self._groups[-1]:
                break
            self._groups.pop()
        if not self._groups:
            self._groups = self._group(list(super().order(waiting, now)))
        return min(len(self._groups[-1]), budget.slots)

    def _group(self, sequences: list[Sequence]) -> list[list[Sequence]]:
        shapes: dict[tuple[int, int], list[Sequence]] = {}
        for seq in sequences:
            shapes.setdefault((len(seq.prompt_ids), seq.max_tokens), []).append(seq)
        size = self.max_batch_size
        cut = [same[i : i + size] for same in shapes.values() for i in range(0, len(same), size)]
        return cut[::-1]

    def order(self, waiting: Collection[Sequence], now: float) -> Iterable[Sequence]:
        return list(self._groups[-1])
