"""The event feed: a ring of what the loop did. The loop appends without waiting; viewers read by number.

An entry is a step, or (for the live page) an arrival, a departure that belongs to no step, or a change of policy.
There is no lock: a writer takes the next number and stores its entry at that number's place. A reader compares the
entry's own number with the one it wants, and so knows whether it is there, not yet there or overwritten. How viewers read is in `api/pages/feed_reader.py`; this module must not know HTTP.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any

from scheduling.iteration import Iteration, Member
from serving.inference import Inference, outcome

CAPACITY = 4096  # entries of the ring
FROZEN_SECONDS = 30.0  # of one send, after which a viewer gives way to a new one
NUMBERED = 2048  # requests whose numbers are remembered, for pages that are opened later
SHOWN_CHARACTERS = 300  # of a prompt, where prompts are shown
MEMBER = "{" + ",".join(f'"{name}":%s' for name in Member._fields) + "}"

dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def data(value: Any) -> bytes:
    return b"data: " + dumps(value).encode() + b"\n\n"


def event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\n" + data(value)


def text(iteration: Iteration) -> str:
    """Return `dumps(iteration.to_dict())`; most of it are members, which one formatting writes several times as fast."""
    id, slot, phase, *numbers = iteration.members.columns
    rows = zip(map(encode_basestring, id), slot, map(encode_basestring, phase), *numbers)
    members = ",".join([MEMBER] * len(id)) % tuple(itertools.chain.from_iterable(rows))
    return dumps(iteration.to_dict(bare=True)).replace('"members":[]', f'"members":[{members}]', 1)


@dataclass(slots=True)
class Entry:
    """One event; its first reader encodes it. `n` is the number of the step, or of the last step before the event."""

    number: int
    kind: str
    n: int
    _value: Any
    _frame: bytes | None = None
    _brief: bytes | None = None

    @property
    def brief(self) -> bytes:
        """The frame for a reader that has the step before: without the members, if those of that step determine them."""
        brief, value = self._brief, self._value
        if brief is None and value is not None and self.kind == "step" and value.repeats:
            record = value.to_dict(bare=True)
            del record["members"]
            brief = self._brief = b"id: %d\n%b" % (self.n, data(record))
        return brief or self.frame

    @property
    def frame(self) -> bytes:
        value, frame = self._value, self._frame  # in this order: the thread that stores the frame then drops the value
        if frame is None:
            if self.kind == "step":
                frame = b"id: %d\ndata: %b\n\n" % (self.n, text(value).encode())
            else:
                frame = event(self.kind, value)
            self._frame = frame
            self._value = None
        return frame


class Viewer:
    """A viewer's connection: `hang_up` ends it; `sending_since` is when the current send began."""

    def __init__(self, hang_up: Callable[[], None]) -> None:
        self.sending_since: float | None = None
        self.gone = False
        self.hang_up = hang_up


class Feed:
    """The ring, its viewers, and the requests that are in the queue now."""

    def __init__(
        self,
        capacity: int = CAPACITY,
        max_viewers: int = 16,
        show_text: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.capacity = capacity
        self.max_viewers = max_viewers
        self.show_text = show_text
        self.waiting: dict[str, dict[str, Any]] = {}
        self.numbers: dict[str, int] = {}  # of the latest requests by id, the same on every page
        self._arrivals = itertools.count(1)
        self.viewers: list[Viewer] = []
        self.closed = False
        self.clock = clock
        self._ring: list[Entry | None] = [None] * capacity
        self._numbers = itertools.count()
        self._newest = -1
        self._n = 0
        self._lock = threading.Lock()  # of the list of viewers; the loop never takes it

    def on_arrival(self, inference: Inference) -> None:
        """Number and record an arrival; called in the handler's thread. Copies are left out, of background work all but its number."""
        if inference.first is not None:
            return
        number = self.numbers[inference.id] = next(self._arrivals)
        if len(self.numbers) > NUMBERED:
            del self.numbers[next(iter(self.numbers))]
        if inference.is_background:
            self._put("number", self._n, {"id": inference.id, "number": number})
            return
        seq = inference.sequence
        arrival: dict[str, Any] = {
            "id": inference.id, "number": number, "t": seq.arrived_at, "prompt_tokens": len(seq.prompt_ids),
            "max_tokens": seq.max_tokens,
        }  # fmt: skip
        if inference.call is not None:
            arrival |= {"program": inference.call.program, "after": inference.call.after}
        if self.show_text:
            arrival["prompt"] = inference.prompt[:SHOWN_CHARACTERS]
        self.waiting[inference.id] = arrival
        self._put("arrival", self._n, arrival)

    def observe(self, iteration: Iteration | None, left: list[Inference]) -> None:
        """Record a step, or departures without a step; called in the loop's thread, and never blocks."""
        if iteration is not None:
            self._n = iteration.n
            self._put("step", iteration.n, iteration)
            for id in iteration.joined:
                self.waiting.pop(id, None)
        for inference in left:
            self.waiting.pop(inference.id, None)
            if iteration is None and inference.first is None and not inference.is_background:
                departure = {"id": inference.id, "t": self.clock(), "reason": outcome(inference)}
                self._put("departure", self._n, departure)

    def announce(self, kind: str, value: Any) -> None:
        """Record an event for the live page that is neither a step nor a request; may be called in any thread."""
        self._put(kind, self._n, value)

    def _put(self, kind: str, n: int, value: Any) -> None:
        number = next(self._numbers)
        self._ring[number % self.capacity] = Entry(number, kind, n, value)
        self._newest = number

    def enter(self, hang_up: Callable[[], None]) -> Viewer | None:
        """Return a new viewer, or None when there are too many; one that has been frozen for long gives way."""
        with self._lock:
            if len(self.viewers) >= self.max_viewers:
                latest = self.clock() - FROZEN_SECONDS
                frozen = [v for v in self.viewers if v.sending_since is not None and v.sending_since < latest]
                if not frozen:
                    return None
                self.viewers.remove(frozen[0])
                frozen[0].gone = True
                frozen[0].hang_up()
            viewer = Viewer(hang_up)
            self.viewers.append(viewer)
            return viewer

    def leave(self, viewer: Viewer) -> None:
        viewer.gone = True
        with self._lock:
            if viewer in self.viewers:
                self.viewers.remove(viewer)

    def close(self) -> None:
        """End all viewers, including those whose client does not read."""
        self.closed = True
        with self._lock:
            for viewer in self.viewers:
                if viewer.sending_since is not None:
                    viewer.hang_up()

    def entries(self) -> list[Entry]:
        """Return all entries in the ring, oldest first."""
        return sorted(filter(None, self._ring), key=lambda entry: entry.number)

    @property
    def steps(self) -> int:
        """The number of the last step."""
        return self._n

    def since(self, number: int, limit: int) -> Iterable[Entry]:
        """Yield at most `limit` entries, starting at a number, or at the oldest if that has been overwritten."""
        for _ in range(limit):
            entry = self._ring[number % self.capacity]
            if entry is None or entry.number < number:
                return
            if entry.number > number:  # skip some more, because the loop goes on writing
                number = self._newest - self.capacity + 1 + self.capacity // 8
                entry = self._ring[number % self.capacity]
                if entry is None or entry.number != number:
                    return
            yield entry
            number += 1
