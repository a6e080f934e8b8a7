"""Deduplication: inferences that ask for the same answer while one of them is in flight share its computation.

The first one is computed. Its copies wait in the inbox like any other inference, read the tokens of the first as they
come, and leave with it, or earlier by themselves. An inference whose client has left is computed to the end as long as
it has copies. Threads that enqueue find the first under a lock. All else happens in the loop's thread, between two
steps. This module must not know HTTP, or what makes two answers equal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from scheduling.iteration import Plan
from scheduling.sequence import Sequence
from serving.inbox import Inbox
from serving.inference import Inference


@dataclass(slots=True)
class Group:
    """An inference that is computed, and its copies: those that the loop has, and the number of those to come."""

    key: Hashable
    first: Inference
    copies: dict[Sequence, Inference] = field(default_factory=dict)
    coming: int = 0


class Dedup:
    """The groups of one loop; `key_of` returns equal keys for inferences that have equal answers.

    `copies` counts the inferences that were not computed, and `tokens` the tokens of their answers.
    """

    def __init__(self, inbox: Inbox, key_of: Callable[[Inference], Hashable]) -> None:
        self.copies = 0
        self.tokens = 0
        self._inbox = inbox
        self._key_of = key_of
        # Of the two dicts, and of `coming`. Threads that enqueue take the inbox's lock while they hold it; the loop never
        # takes it while it holds the inbox's.
        self._lock = threading.Lock()
        self._by_key: dict[Hashable, Group] = {}
        self._by_sequence: dict[Sequence, Group] = {}
        self.shared: dict[Sequence, Group] = {}  # of these, those with copies that the loop has; for its thread alone

    def reserve(self, inferences: list[Inference]) -> None:
        """Find the first of each inference, and reserve room for all; raise InferenceError and change nothing if full.

        A copy takes a place in the queue, because it has a client that waits, but no queued tokens.
        """
        keys = [self._key_of(inference) for inference in inferences]
        # Joining and reserving are one step: a first that does not get in must not have won copies meanwhile.
        with self._lock:
            for inference, key in zip(inferences, keys):
                self._join(inference, key)
            try:
                self._inbox.reserve(inferences)
            except BaseException:
                for inference in reversed(inferences):
                    self._undo(inference)
                raise

    def _join(self, inference: Inference, key: Hashable) -> None:
        group = self._by_key.get(key)
        if group is None:
            self._by_key[key] = self._by_sequence[inference.sequence] = Group(key, inference)
        else:
            inference.first = group.first
            group.coming += 1

    def _undo(self, inference: Inference) -> None:
        if inference.first is None:
            self._forget(self._by_sequence[inference.sequence])
        else:
            self._by_sequence[inference.first.sequence].coming -= 1
            inference.first = None

    def _forget(self, group: Group) -> None:
        del self._by_key[group.key]
        del self._by_sequence[group.first.sequence]
        self.shared.pop(group.first.sequence, None)

    def add(self, copy: Inference) -> bool:
        """Take in a copy that arrived, with the tokens that there are; return whether its first has already left."""
        assert copy.first is not None
        self.copies += 1
        first, seq = copy.first.sequence, copy.sequence
        seq.output_ids, seq.details, seq.prompt_details = first.output_ids, first.details, first.prompt_details
        seq.computed = len(seq.prompt_ids)  # nothing of it is left to compute
        copy.text = copy.first.text
        with self._lock:
            group = self._by_sequence.get(first)
            if group is not None:
                group.coming -= 1
                group.copies[seq] = copy
                self.shared[first] = group
        if group is None:
            self._finish(copy)
            return True
        _follow(seq, first)
        if seq.output_ids and not first.is_finished:
            copy.publish_tokens()
        return False

    def publish(self, plan: Plan) -> None:
        """Notify the readers of copies about the new tokens of a step."""
        for first, group in self.shared.items():
            for copy in group.copies.values() if first.last_iteration == plan.number else ():
                _follow(copy.sequence, first)
                if not first.is_finished:
                    copy.publish_tokens()

    def settle(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Return sequences that left the scheduler and those of their copies, which end in the same way."""
        left: list[Sequence] = []
        for first in sequences:
            left.append(first)
            with self._lock:
                group = self._by_sequence.get(first)
                if group is not None:
                    self._forget(group)
            for copy in group.copies.values() if group is not None else ():
                self._finish(copy)
                left.append(copy.sequence)
        return left

    def release(self, ended: list[Inference], now: float) -> tuple[list[Inference], list[Sequence]]:
        """Sort out inferences that ended early: return those that no client waits for any more, and the copies that leave."""
        alone: list[Inference] = []
        leaving: list[Sequence] = []
        for inference in dict.fromkeys(ended):
            first = inference.first or inference
            group = self._by_sequence.get(first.sequence)
            if inference is not first:
                if group is None or group.copies.pop(inference.sequence, None) is None:
                    continue  # it has left, or has not arrived
                seq, has_error = inference.sequence, inference.error is not None
                seq.finish_reason, seq.state, seq.finished_at = "abort" if has_error else "length", "finished", now
                self.tokens += len(inference.output_ids)
                leaving.append(seq)
            if group is None or (first.is_finished and self._close(group)):
                alone.append(first)
        return alone, leaving

    def _close(self, group: Group) -> bool:
        """Take no more copies into a group, unless it has any."""
        with self._lock:
            if group.copies or group.coming:
                return False
            self._forget(group)
            return True

    def _finish(self, copy: Inference) -> None:
        """End the sequence of a copy in the way in which its first ended."""
        assert copy.first is not None
        first, seq = copy.first.sequence, copy.sequence
        _follow(seq, first)
        seq.finish_reason, seq.error, seq.state = first.finish_reason, first.error, "finished"
        seq.finished_at = _not_before(seq.arrived_at, first.finished_at)
        self.tokens += len(copy.output_ids)


def _follow(seq: Sequence, first: Sequence) -> None:
    """Copy the progress of a first to its copy. No moment is before the copy's own arrival."""
    seq.state, seq.cached = first.state, first.cached
    seq.first_iteration, seq.last_iteration = first.first_iteration, first.last_iteration
    seq.batch_sum, seq.batch_max = first.batch_sum, first.batch_max
    seq.scheduled_at = _not_before(seq.arrived_at, first.scheduled_at)
    seq.first_token_at = _not_before(seq.arrived_at, first.first_token_at)
    seq.last_token_at = _not_before(seq.arrived_at, first.last_token_at)


def _not_before(arrival: float, moment: float | None) -> float | None:
    return None if moment is None else max(arrival, moment)
