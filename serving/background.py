"""Background work: inferences that are computed only while the server has no other.

When another request arrives, those in the batch lose their slots before the next step and keep their tokens. Their pages
stay in the prefix cache as long as no other request needs them, so that little is computed again. Only the loop's thread
uses this. It must not know HTTP, or what the inferences are for.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from serving.inference import Inference


class Background:
    """The background inferences of one loop: those outside of the scheduler (`waiting`), and those in it (`admitted`)."""

    def __init__(self) -> None:
        self.waiting: dict[Sequence, Inference] = {}
        self.admitted: dict[Sequence, Inference] = {}

    def add(self, inference: Inference) -> None:
        """Take in an inference that arrived."""
        self.waiting[inference.sequence] = inference

    def yield_slots(self, scheduler: Scheduler, now: float, admit: Callable[[Inference], None]) -> list[Sequence]:
        """Take all inferences out of the scheduler if it has another sequence, and `admit` them if it has none.

        Return finished sequences that leave with those that were taken out.
        """
        leaving: list[Sequence] = []
        if self.admitted:
            self.admitted = {seq: one for seq, one in self.admitted.items() if seq.state != "finished"}
        others = len(scheduler.running) + len(scheduler.waiting) - len(self.admitted)
        if others and self.admitted:
            # A finished one only holds its slot, and leaves by itself.
            suspended = {seq: one for seq, one in self.admitted.items() if not seq.is_finished}
            leaving = scheduler.suspend(list(suspended), now)
            self.admitted = {seq: one for seq, one in self.admitted.items() if seq not in suspended}
            self.waiting = suspended | self.waiting
        elif self.waiting and not others:
            ready, self.waiting = self.waiting, {}
            self.admitted |= ready
            for inference in ready.values():
                admit(inference)
        return leaving

    def release(self, ended: list[Inference], now: float) -> list[Sequence]:
        """Return the sequences of inferences that ended outside of the scheduler."""
        leaving = []
        for inference in ended:
            seq = inference.sequence
            if self.waiting.pop(seq, None) is not None:
                reason = "length" if inference.error is None else "abort"
                seq.finish_reason, seq.state, seq.finished_at = reason, "finished", now
                leaving.append(seq)
        return leaving
