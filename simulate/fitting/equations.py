"""What a log of requests says of the steps between its times: sums of their terms, and how long these took.

The log has no step times. A simulation of its requests says which steps lie between two of its times. This module must not know
how a law is found from that.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np

from costs.cost import Affine, Wrapped
from costs.steps import Step
from scheduling.iteration import Plan
from simulate.logs.log import Log
from simulate.measured.least_squares import TERMS, terms_of
from simulate.scenario import Scenario
from simulate.simulator import Simulation
from simulate.trace import Trace

APART = 20  # steps between two marks, or chunks of an answer whose times are known: fewer say little beside the noise of one
SOON = 4  # steps within which the first token of a request comes that did not queue
SHORTEST = 0.05  # seconds; shorter intervals are as noisy as this one
PATIENCE = 3.0  # times as long as the log that a simulation may take to get as far


@dataclass(frozen=True)
class Watched(Wrapped):
    """The same law, which keeps the steps that it was asked about."""

    asked: list[Step]
    flat = False  # so that it is asked about each

    def seconds(self, step: Step) -> float:
        self.asked.append(step)
        return self.law.seconds(step)


class Trajectory(Simulation):
    """A simulation of a log that keeps the sums, the beginning and the end of each step, and stops after the last known time."""

    def __init__(self, log: Log, scenario: Scenario[Trace], until: float = np.inf) -> None:
        self.until = until
        self.steps: list[Step] = []
        self.begins: list[float] = []
        self.ends: list[float] = []
        self.queued: list[int] = []
        self.asked: list[Step] = []
        scheduler, sequences = scenario.fresh(scenario.policies[0])
        watched = Watched(scenario.cost, self.asked)
        super().__init__(scheduler, sequences, watched, scenario.host, records=False, fast_forward=True)
        self._due = [(s, "first_token_at") for s, at in zip(sequences, log.first) if at <= until]
        self._due += [(s, "finished_at") for s, at in zip(sequences, log.last) if at <= until]
        self.run()
        self.first, self.last = (
            np.array([np.nan if (at := getattr(seq, name)) is None else at for seq in sequences])
            for name in ("first_token_at", "finished_at")
        )

    def turn(self) -> bool:
        """Go on until all that the log knows by `until` has happened here, too, but not much longer."""
        if self.now > self.until:
            while self._due and getattr(*self._due[-1]) is not None:
                self._due.pop()
            if not self._due or self.now > PATIENCE * self.until:
                return False
        return super().turn()

    def serve(self, plan: Plan) -> None:
        self._began = self.now
        super().serve(plan)

    def passed(self, ends: list[float]) -> None:
        self.steps += self.asked
        self.asked.clear()
        self.begins += [self._began, *ends[:-1]]
        self.queued += [len(self.scheduler.waiting)] * len(ends)
        self.ends += ends
        self._began = ends[-1]


@dataclass(frozen=True)
class Equations:
    """Terms summed over intervals between measured times, their seconds, weights, steps and ends.

    After the law's terms, a row says whether the very first step and the arrival of a request are in the interval.
    """

    terms: np.ndarray
    seconds: np.ndarray
    weight: np.ndarray
    steps: np.ndarray
    ends: np.ndarray

    def of(self, some: np.ndarray) -> Equations:
        """Return those of these numbers."""
        return Equations(*(getattr(self, field.name)[some] for field in fields(self)))

    @property
    def error(self) -> np.ndarray:
        """How far off each interval usually is, up to a common factor: it grows with the root, as of a sum of steps."""
        return np.asarray(np.sqrt(np.maximum(self.seconds, SHORTEST)))


class Intervals:
    """Collects the intervals between measured times, with the simulated steps that lie in each."""

    def __init__(self, log: Log, way: Trajectory, law: Affine) -> None:
        self.log, self.way = log, way
        self.terms = np.array([terms_of(step, law) for step in way.steps])
        self.sums = np.vstack([np.zeros(len(TERMS)), np.cumsum(self.terms, axis=0)])
        self.stops = np.array(way.ends)
        self.at_first, self.at_last = (np.searchsorted(self.stops, t + 1e-9) for t in (way.first, way.last))
        self.has_first = np.isfinite(log.first) & np.isfinite(way.first)
        self.has_last = np.isfinite(log.last) & np.isfinite(way.last) & self.has_first
        self.found: list[tuple[np.ndarray, float, float, int, float]] = []

    def add(self, begin: int, end: int, since: float, until: float, part: float = 0.0, arrival: bool = False) -> None:
        """Add the steps from `begin` to `end`, and a part of the step before them, which took from `since` to `until`."""
        if until > since and end >= begin:
            row = self.sums[end] - self.sums[begin] + (part * self.terms[begin - 1] if part else 0.0)
            first = begin == 0 or (begin == 1 and part > 0)
            self.found.append((np.append(row, (first, arrival)), until - since, until, end - begin + (part > 0), 1.0))

    def equations(self) -> Equations:
        """Return all of them. All answers together count as much as the time that they fill once."""
        self.answers()
        answers, spans = len(self.found), sum(each[1] for each in self.found)
        self.backlogs()
        self.waits()
        if not self.found:  # the law was so slow that nothing of the log was simulated: the next one costs little
            self.found.append((np.eye(len(TERMS) + 2)[0], 1e-6, 0.0, 1, 1.0))
        terms, seconds, ends, steps, weight = map(np.array, zip(*self.found))
        filled = float(np.nanmax(self.log.last) - self.log.at[0])
        weight[:answers] = min(1.0, filled / max(spans, 1e-9))
        return Equations(terms, seconds, weight, steps, ends)

    def answers(self) -> None:
        """Add each answer, in pieces where the times of its chunks are known: as many steps as tokens, whatever the law."""
        for i in map(int, np.flatnonzero(self.has_last & (self.log.output > 1))):
            begin, end = int(self.at_first[i]), int(self.at_last[i])
            marks = [(begin, self.log.first[i]), (end, self.log.last[i])]
            if len(self.log.chunks) > i and end - begin == self.log.output[i] - 1:  # it decoded in every step
                times, counts = self.log.chunks[i]
                place = np.cumsum(counts)[::APART] if len(counts) else ()
                marks[1:1] = [
                    (begin + int(p) - 1, float(t)) for p, t in zip(place, times[::APART]) if begin < begin + p - 1 < end
                ]
            for (before, since), (at, until) in pairwise(marks):
                self.add(before, at, since, until)

    def backlogs(self) -> None:
        """Add stretches between first and last tokens of any requests, while requests queue without a break.

        Otherwise a faster law has more steps there, looks even faster in the next round, and runs away.
        """
        idle = np.concatenate([[0], np.cumsum(np.array(self.way.queued) == 0)])
        marks = sorted(
            [(int(self.at_first[i]), self.log.first[i]) for i in np.flatnonzero(self.has_first)]
            + [(int(self.at_last[i]), self.log.last[i]) for i in np.flatnonzero(self.has_last)]
        )
        before, since = marks[0] if marks else (0, 0.0)
        for at, clock in marks[1:]:
            if idle[at] > idle[before]:
                before, since = at, clock
            elif at - before >= APART:
                self.add(before, at, since, clock)
                before, since = at, clock

    def waits(self) -> None:
        """Add the waits of requests that met no queue: the rest of the step that runs when they arrive, and their own."""
        starts = np.array(self.way.begins)
        for i in np.flatnonzero(self.has_first):
            begin, at = int(np.searchsorted(self.stops, self.log.at[i])), self.log.at[i]
            if self.at_first[i] - begin <= SOON and (i == 0 or not self.way.queued[max(0, begin - 1)]):
                part = min(1.0, (self.stops[begin] - at) / max(1e-9, self.stops[begin] - starts[begin]))
                at += self.way.host.wake if part == 1 else 0.0
                self.add(begin + 1, int(self.at_first[i]), at, self.log.first[i], part, arrival=True)
