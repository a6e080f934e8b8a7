"""Admission control by program: a program begins only while its KV fits beside that of the active ones; the others go on.

A program is active while one of its calls runs, and afterward while the pages of its last call are pinned (as in
Continuum, arXiv 2511.02230). Calls of active programs join as the order ranks them. Any other request joins if this
leaves enough pages for a mean answer of each active program that has no running call; if not, those behind it are tried.
A request that has waited for `guard` seconds goes first.

Pinned pages are idle until the tool is done; evicted ones are computed again while all running requests wait. So a pin
pays if it is shorter than the time to compute the whole pool as a prompt, however many pages it has (InferCept, arXiv
2402.01869). Pins last as long as would have saved most for the latest calls of all programs.
"""

from collections import deque
from collections.abc import Collection, Hashable, Iterable
from math import inf

from policies import dynamic
from scheduling.latest import Latest
from scheduling.options import option
from scheduling.policy import Budget
from scheduling.sequence import Sequence

LATEST, FEW = 256, 16  # pauses that are remembered, and that a choice needs
SLACK = 1.1  # times the pause that a pin is made for: the next one may be a little longer
TRIED = 64  # requests that do not fit, after which a step tries no others


class Policy(dynamic.Policy):
    guard = option(100.0, "seconds of waiting after which the oldest request goes first", low=0.0)

    def __init__(self) -> None:
        claims, uses = self.claims.without_order(), dict.fromkeys((*self.claims.uses, "program", "session"))
        self.claims = claims.but(guard=self.guard, overtaking_tokens=0, uses=tuple(uses))
        self._running: list[Sequence] = []
        self._until = Latest[Hashable, float]()  # by program, when its pins end
        self._pauses = Pauses()

    def admit(self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float) -> int:
        self._running = running
        return super().admit(waiting, running, budget, now)

    def order(self, waiting: Collection[Sequence], now: float) -> Iterable[Sequence]:
        overdue = [seq for seq in waiting if now - seq.arrived_at > self.guard]
        yield from sorted(overdue, key=lambda seq: seq.arrived_at)
        passed = set(overdue)
        for name in [name for name, until in self._until.items() if until < now]:
            del self._until[name]
        at_work, unfit = set(map(program_of, self._running)), 0
        for seq in super().order(waiting, now):
            if seq in passed:
                continue
            name = program_of(seq)
            is_active = seq.preemptions or (name and (name in at_work or name in self._until))
            # While nothing runs, any request may join: it takes pinned pages if no others are free.
            if is_active or not self._running or (unfit < TRIED and self._fits(seq, at_work)):
                yield seq
                if seq.state == "running":
                    at_work.add(name)
            else:
                unfit += 1

    def _fits(self, seq: Sequence, at_work: Collection[Hashable]) -> bool:
        """Return whether a request leaves pages for the next answers of the active programs of which no call runs."""
        silent = sum(name not in at_work for name in self._until)
        return self.room(seq) >= self.reserve_tokens(seq) + silent * self._pauses.answer

    def on_arrival(self, seq: Sequence, now: float) -> None:
        super().on_arrival(seq, now)
        self._pauses.end(program_of(seq), now)

    def on_finish(self, seq: Sequence, now: float) -> None:
        super().on_finish(seq, now)
        self._pauses.begin(seq, now, self.kv_total)

    def keep_until(self, seq: Sequence, now: float) -> float:
        if seq.finish_reason == "abort" or not (name := program_of(seq)):
            return now
        seconds = min(self._pauses.worth_keeping(self.kv_total), seq.keep_s or inf)
        until = self._until[name] = max(self._until.get(name, now), now + seconds)
        return until


class Pauses:
    """How long programs paused between two calls, and what pages cost meanwhile."""

    def __init__(self) -> None:
        self._began = Latest[Hashable, float]()  # by program that pauses, the longest first
        self._latest: deque[float] = deque(maxlen=LATEST)  # seconds, inf for those that are not worth a pin
        self._answers = (0, 0)  # ended calls, and the tokens of their answers
        # Sums over prompts: 1, n, t, n x t and n x n for n tokens that were computed in t seconds.
        self._prompts: tuple[float, ...] = (0.0,) * 5

    @property
    def answer(self) -> int:
        """The mean number of tokens of an answer."""
        return self._answers[1] // max(1, self._answers[0])

    def begin(self, seq: Sequence, now: float, pool: int) -> None:
        """Note that a request has left; `pool` are the KV tokens of all pages."""
        if seq.first_token_at is None or seq.scheduled_at is None or seq.finish_reason == "abort":
            return
        self._answers = self._answers[0] + 1, self._answers[1] + len(seq.output_ids)
        if not seq.preemptions:
            n, t = len(seq.prompt_ids) - seq.cached, seq.first_token_at - seq.scheduled_at
            self._prompts = tuple(total + x for total, x in zip(self._prompts, (1, n, t, n * t, n * n)))
        if name := program_of(seq):
            worth = self.break_even(pool)
            while self._began and now - next(iter(self._began.values())) > worth:
                self._began.popitem(last=False)
                self._latest.append(inf)
            self._began[name] = now

    def end(self, name: Hashable, now: float) -> None:
        """Note that a program, which may be new, has sent a call."""
        if (began := self._began.pop(name, None)) is not None:
            self._latest.append(now - began)

    def break_even(self, pool: int) -> float:
        """Return the seconds in which pinned pages cost as much as computing them again, by least squares of all prompts."""
        count, n, t, nt, nn = self._prompts
        spread = count * nn - n * n
        return max(0.0, (count * nt - n * t) / spread) * pool if spread else 0.0

    def worth_keeping(self, pool: int) -> float:
        """Return the seconds of a pin that would have saved most in the latest pauses."""
        worth = self.break_even(pool)
        if len(self._latest) < FEW:
            return worth  # at most twice as costly as if the pause were known
        pauses = sorted(self._latest)
        most = best = spent = before = 0.0
        for ended, pause in enumerate(pauses):
            if pause > worth:
                break
            spent += (pause - before) * (len(pauses) - ended)
            before, saved = pause, (ended + 1) * worth - spent
            if saved > most:
                most, best = saved, SLACK * pause
        return best


def program_of(seq: Sequence) -> str:
    return seq.program or seq.session
