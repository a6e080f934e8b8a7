"""A window on active programs (CONCUR, arXiv 2601.22705): as many agents at once as find their contexts in the cache.

As in `program-admission`, calls of active programs join as the order ranks them, and other programs wait; but how many may be
active is found by trying, as TCP does with packets in flight: one more while the next calls of programs find their contexts in
the cache and there is KV to spare, half as many when they do not: then the others pause before their next call. Without it, each agent evicts the contexts of the others
while their tools run, and all are computed again with each call.

A program is active until no call has come for about as long as the longest recent pauses, since no request says that it is the
last. Ours: that, the values of the options, and the guard. No pages are pinned.
"""

from collections import deque
from collections.abc import Collection, Hashable
from math import ceil, inf

from policies import program_admission
from policies.program_admission import FEW, LATEST, SLACK, program_of
from scheduling.latest import Latest
from scheduling.options import option
from scheduling.policy import Budget
from scheduling.sequence import Sequence

USUAL = 0.95  # of the latest pauses, those after which a program counts as ended


class Policy(program_admission.Policy):
    start = option(0, "active programs at the beginning; 0: as many as there are slots", low=0)
    hits = option(
        0.7, "share of their contexts that calls must find in the cache; below, the window is halved", low=0.0, high=1.0
    )
    spare = option(0.1, "share of the KV memory that must be free for the window to grow", low=0.0, high=1.0)
    every = option(16, "calls between two changes of the window", low=1, high=100_000)
    idle = option(30.0, "maximum seconds without a call for which a program counts as active", low=0.0)

    def __init__(self) -> None:
        self.window = self.start or self.max_batch_size
        self._free = 1.0  # share of the KV
        # Since the last change: calls, and how many tokens of their contexts they found.
        self._calls, self._found, self._wanted = 0, 0.0, 0.0
        self._contexts = Latest[Hashable, float]()  # tokens, by program and session
        self._left = Latest[Hashable, float]()  # when the last call of a program left
        self._latest: deque[float] = deque(maxlen=LATEST)  # seconds of pauses

    def admit(self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float) -> int:
        self._free = budget.kv_tokens / self.kv_total if self.kv_total else 1.0
        return super().admit(waiting, running, budget, now)

    def _fits(self, seq: Sequence, at_work: Collection[Hashable]) -> bool:
        return len({*at_work, *self._until}) < self.window and self.room(seq) >= self.reserve_tokens(seq)

    def on_arrival(self, seq: Sequence, now: float) -> None:
        super().on_arrival(seq, now)
        name = program_of(seq)
        if (left := self._left.pop(name, None)) is not None:
            self._latest.append(now - left)
        if name in self._until:
            self._until[name] = inf  # active while its call waits, too

    def on_admit(self, seq: Sequence, now: float) -> None:
        super().on_admit(seq, now)
        name, context = program_of(seq), self._contexts.get((seq.program, seq.session))
        was_active = name in self._until
        if name:
            self._until[name] = inf
        if context is None or seq.preemptions or not was_active:
            return  # the context of a program that was not active may well be gone
        self._calls += 1
        self._found += min(seq.cached, context)
        self._wanted += min(len(seq.prompt_ids), context)
        if self._calls >= self.every:
            if self._found < self.hits * self._wanted:
                self.window = ceil(self.window / 2)
                for other in [*self._until][self.window :]:
                    del self._until[other]
            elif self._free >= self.spare:
                self.window += 1
            self._calls, self._found, self._wanted = 0, 0.0, 0.0

    def on_finish(self, seq: Sequence, now: float) -> None:
        super().on_finish(seq, now)
        if not (name := program_of(seq)):
            return
        pauses = sorted(self._latest)
        usual = SLACK * pauses[int(USUAL * len(pauses))] if len(pauses) >= FEW else self.idle
        if seq.scheduled_at is not None:
            self._contexts[seq.program, seq.session] = seq.computed
            self._left[name] = now
        if name in self._until:
            self._until[name] = now + min(usual, self.idle)

    def keep_until(self, seq: Sequence, now: float) -> float:
        return now
