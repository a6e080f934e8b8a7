"""The steps of an upstream as they must have been, once it is known how long the answers in them are. Pure.

From outside, an answer in one piece has no tokens until its end, several tokens may come in one event, and those of one step
in several bursts. So the pause before each burst is divided into as many steps as an answer in it had tokens, on average, and
each answer gets a token in each step. A step is passed on when all that ran in it have ended.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from math import inf

from scheduling.iteration import Iteration, Member, SlotSteps
from serving.inference import Inference

AT_ONCE, MOST = 64, 10_000  # bursts that are taken together, and that are kept for answers that run
AFTER = 1e-6  # seconds, above the error of a sum of times
WHOLE = 0.2  # of the time of an answer in one piece, within which all of its tokens come


class _Answer:
    """An answer that has ended; `begin` is when the first token of a stream came, or when another joined."""

    def __init__(self, inference: Inference, late: int) -> None:
        seq = self.seq = inference.sequence
        self.inference, self.tokens, self.done = inference, len(seq.output_ids), 0
        self.joined, first, self.end = seq.scheduled_at or 0.0, seq.first_token_at or 0.0, seq.last_token_at or 0.0
        self.streams = first < self.end - WHOLE * (self.end - self.joined)
        self.begin, self.late = (first, 0) if self.streams else (self.joined, late)
        self.steps = self.tokens + self.late - self.streams  # from begin to end

    def runs(self, began: float, ended: float) -> bool:
        """Return whether it has a part in a step."""
        return self.joined < ended - AFTER and self.end > began + AFTER and self.done < self.tokens

    def step(self, ended: float) -> Member:
        """Return its part in the next step."""
        prompt, phase, count = len(self.seq.prompt_ids), "decode" if self.done else "prefill", 0
        if self.late:
            self.late -= 1
        elif ended > self.begin - AFTER:
            self.done, count = self.done + 1, 1 if self.done else prompt
        computed = prompt + self.done - 1 if self.done else 0
        return Member(self.seq.id, self.seq.slot, phase, count, computed, prompt + self.tokens)


class Steps:
    """Takes the records of an upstream's bursts, and passes on records of its steps to `tell`."""

    def __init__(self, tell: Callable[[Iteration | None, list[Inference]], None]) -> None:
        self._tell, self._number, self._over = tell, 0, 0.0
        self._bursts: list[Iteration] = []
        self._answers: list[_Answer] = []
        self._open: dict[str, tuple[float, int]] = {}  # of each request that runs: the burst before it, if others ran

    def observe(self, burst: Iteration | None, left: list[Inference]) -> None:
        """Take in a burst and the requests that left; called in the loop's thread."""
        if burst is not None:
            before, late = _end(self._bursts[-1]) if self._bursts else 0.0, len(burst.members) > len(burst.joined)
            self._open.update(dict.fromkeys(burst.joined, (before, int(late))))
            self._bursts.append(burst)
        self._answers += [_Answer(inference, self._open.pop(inference.id, (0.0, 0))[1]) for inference in left]
        horizon = min(self._open.values())[0] if self._open and len(self._bursts) < MOST else inf
        count = bisect_right(self._bursts, horizon, key=_end)
        if count >= AT_ONCE or not self._open:
            self._pass_on(count)

    def _pass_on(self, count: int) -> None:
        """Pass on the steps of the first bursts; a pause of less than half a step belongs to the next."""
        began, ended = 0.0, inf
        joined: list[str] = []
        left: list[tuple[str, str]] = []
        for i, burst in enumerate(self._bursts[:count]):
            began, ended, joined, left = began or burst.t, _end(burst), joined + burst.joined, left + burst.left
            self._over += self._steps(burst)
            number = max(round(self._over), int(i == count - 1))
            self._over -= number
            for rest in range(number, 0, -1):
                seconds = (ended - began) / rest
                rows = [a.step(began + seconds) for a in self._answers if a.runs(began, began + seconds)]
                step = replace(
                    burst, n=self._number, t=began, seconds=seconds, members=rows, joined=joined, preempted=[],
                    left=left if rest == 1 else [], slot_steps=SlotSteps(len(rows), idle=max(0.0, sum(burst.slot_steps) - len(rows))),
                )  # fmt: skip
                self._tell(step, [])
                self._number, began, joined = self._number + 1, began + seconds, []
            began, left = (0.0, []) if number else (began, left)
        del self._bursts[:count]
        self._tell(None, [a.inference for a in self._answers if a.end < ended + AFTER])
        self._answers = [a for a in self._answers if a.end >= ended + AFTER]

    def _steps(self, burst: Iteration) -> float:
        """Return the steps since the last burst: the tokens of a stream, or what the answers in one piece took on average."""
        there = [a for a in self._answers if a.begin < _end(burst) - AFTER and a.end > burst.t + AFTER]
        streams = {a.seq.id for a in self._answers if a.streams}
        rows = [m for m in burst.members if m.id in streams and (m.tokens or m.phase == "idle")]
        if rows or not there:
            return sum(1 if m.phase == "prefill" else m.tokens for m in rows) / max(1, len(rows))
        return burst.seconds * sum(a.steps for a in there) / sum(a.end - a.begin for a in there)


def _end(burst: Iteration) -> float:
    return burst.t + burst.seconds
