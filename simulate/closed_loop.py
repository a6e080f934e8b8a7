"""Programs in a closed loop: a call is sent when the calls that it depends on are answered and its tool is done.

Everything else is drawn beforehand, so only the times at which calls arrive depend on the policy. This module must not
know policies or costs.
"""

from __future__ import annotations

import collections.abc as abc
from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from scheduling.sequence import Sequence

if TYPE_CHECKING:  # a run in a browser draws no programs
    from client.data import Call

ANSWERED = ("length", "stop")


class ClosedLoop(list[Sequence]):
    """The sequences with which programs begin; `follow` returns the others.

    A sequence belongs to each call, and has the start of its program as `arrived_at`. After a call that was not
    answered, its program sends no more.
    """

    def __init__(self, sequences: abc.Sequence[Sequence], calls: abc.Sequence[Call]) -> None:
        self.sequences, self.calls = sequences, calls
        self.programs: dict[str, list[Sequence]] = {}
        self._children: dict[str, list[int]] = {seq.id: [] for seq in sequences}
        self._missing = [len(call.after) for call in calls]
        fresh, answers, volumes = Counter[str](), Counter[str](), dict[str, float]()
        for i, (seq, call) in enumerate(zip(sequences, calls)):
            self.programs.setdefault(call.program, []).append(seq)
            fresh[call.program] += call.fresh
            answers[call.program] += call.answer
            volume = call.answer * (len(seq.prompt_ids) + (call.answer + 1) / 2)
            volumes[call.program] = volumes.get(call.program, 0.0) + volume
            for parent in call.after:
                self._children[sequences[parent].id].append(i)
        self.began = {name: some[0].arrived_at for name, some in self.programs.items()}
        for seq, call in zip(sequences, calls):
            seq.program_tokens = fresh[call.program], answers[call.program]
            seq.program_volume = volumes[call.program]
        super().__init__(self._sent(i, seq.arrived_at) for i, seq in enumerate(sequences) if not calls[i].after)

    def keep(self, programs: Collection[str]) -> ClosedLoop:
        """Leave out all other programs, before any is served."""
        self.programs = {name: some for name, some in self.programs.items() if name in programs}
        kept = {seq.id for some in self.programs.values() for seq in some}
        self[:] = [seq for seq in self if seq.id in kept]
        return self

    def follow(self, left: Iterable[tuple[str, str]], now: float) -> list[Sequence]:
        """Return the sequences that are sent because these, pairs of id and reason, have left; clients know it at `now`."""
        sent = []
        for i in (child for id, reason in left if reason in ANSWERED for child in self._children[id]):
            self._missing[i] -= 1
            others = self.programs[self.calls[i].program]
            if not self._missing[i] and all(seq.finish_reason in (None, *ANSWERED) for seq in others):
                sent.append(self._sent(i, now))
        return sent

    def times(self, lag: float = 0.0) -> dict[str, float]:
        """Return the seconds of each program whose calls were all answered; clients have an answer after a `lag`."""
        return {
            name: max(seq.finished_at or 0.0 for seq in some) + lag - self.began[name]
            for name, some in self.programs.items()
            if all(seq.finish_reason in ANSWERED for seq in some)
        }

    def _sent(self, i: int, at: float) -> Sequence:
        seq, at = self.sequences[i], at + self.calls[i].tool_s
        if seq.deadline is not None:  # which counts from the arrival
            seq.deadline += at - seq.arrived_at
        seq.arrived_at = at
        return seq
