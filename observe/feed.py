"""A ring of what the loop did, for viewers who read it by number; the loop appends and waits for nobody.

They read it by `api/feed_reader.py`.

An entry is a step, or (for the live page) an arrival, a departure that belongs to no step, or a change of policy.
Nobody holds a lock: a writer takes the next number and puts its entry into that place, a reader looks at the place of
the number it wants next, and sees by the entry's own number whether it is there, not yet there, or overwritten. It must
not know HTTP.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from json.encoder import encode_basestring
from typing import Any

from serving.inference import Inference, outcome

KEPT = 4096  # entries of the ring
FROZEN_SECONDS = 30.0  # of one send, after which a viewer gives way to a new one
SHOWN_CHARACTERS = 300  # of a prompt, where prompts are shown


class Entry:
    """One step, arrival or departure, turned into bytes by the first who reads it."""

    __slots__ = ("_frame", "_value", "kind", "n", "number")

    def __init__(self, number: int, kind: str, n: int, value: Any) -> None:
        self.number = number
        self.kind = kind
        self.n = n  # of the step; of others, that of the last step before
        self._value = value
        self._frame: bytes | None = None

    @property
    def frame(self) -> bytes:
        value, frame = (self._value, self._frame)  # in this order: whoever makes the frame drops the value last
        if frame is None:
            if self.kind == "step":
                frame = b"id: %d\ndata: %b\n\n" % (self.n, text(*value).encode())
            else:
                frame = event(self.kind, value)
            self._frame = frame
            self._value = None
        return frame


def pack(iteration: Any) -> tuple[Any, Any]:
    """Return a copy whose members are one flat tuple, which the garbage collector need not walk through."""
    members = iteration.members
    flat = tuple(itertools.chain.from_iterable(members))
    return replace(iteration, members=flat), type(members[0]) if members else None


def text(packed: Any, kind: Any) -> str:
    """Return what `dumps` makes of a packed record's `to_dict()`, several times faster.

    Its members, of that kind of named tuple (strings and whole numbers), are most of it, and are written by one
    formatting.
    """
    whole = dumps(replace(packed, members=[]).to_dict())
    if kind is None:
        return whole
    values, width = list(packed.members), len(kind._fields)
    for field, value in enumerate(values[:width]):
        if isinstance(value, str):
            values[field::width] = map(encode_basestring, values[field::width])
    form = "{" + ",".join(f'"{name}":%s' for name in kind._fields) + "}"
    members = ",".join([form] * (len(values) // width)) % tuple(values)
    return whole.replace('"members":[]', f'"members":[{members}]', 1)


dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def data(value: Any) -> bytes:
    return b"data: " + dumps(value).encode() + b"\n\n"


def event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\n" + data(value)


class Viewer:
    """One who watches: `begun` is when the send that is under way began, `hang_up` ends its connection."""

    def __init__(self, hang_up: Callable[[], None]) -> None:
        self.begun: float | None = None
        self.gone = False
        self.hang_up = hang_up


class Feed:
    """The ring, who watches it, and who waits in the queue just now."""

    def __init__(
        self,
        kept: int = KEPT,
        most_viewers: int = 16,
        show_text: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.kept = kept
        self.most_viewers = most_viewers
        self.show_text = show_text
        self.waiting: dict[str, dict[str, Any]] = {}
        self.viewers: list[Viewer] = []
        self.closed = False
        self.clock = clock
        self._ring: list[Entry | None] = [None] * kept
        self._numbers = itertools.count()
        self._newest = -1
        self._n = 0
        self._lock = threading.Lock()  # of the list of viewers: the loop never takes it

    def on_arrival(self, inference: Inference) -> None:
        """Note an arrival; called in the handler's thread."""
        seq = inference.sequence
        arrival: dict[str, Any] = {
            "id": inference.id, "t": seq.arrived_at, "prompt_tokens": len(seq.prompt_ids),
            "max_tokens": seq.max_tokens,
        }  # fmt: skip
        if self.show_text:
            arrival["prompt"] = inference.prompt[:SHOWN_CHARACTERS]
        self.waiting[inference.id] = arrival
        self._put("arrival", self._n, arrival)

    def observe(self, iteration: Any, left: list[Inference]) -> None:
        """Note a step, or who left without one; called in the loop's thread, and waits for nobody."""
        if iteration is not None:
            self._n = iteration.n
            self._put("step", iteration.n, pack(iteration))
            for id in iteration.joined:
                self.waiting.pop(id, None)
        for inference in left:
            self.waiting.pop(inference.id, None)
            if iteration is None:
                gone = {"id": inference.id, "t": self.clock(), "reason": outcome(inference)}
                self._put("departure", self._n, gone)

    def announce(self, kind: str, value: Any) -> None:
        """Note what is neither step nor request, for the live page; may be called in any thread."""
        self._put(kind, self._n, value)

    def _put(self, kind: str, n: int, value: Any) -> None:
        number = next(self._numbers)
        self._ring[number % self.kept] = Entry(number, kind, n, value)
        self._newest = number

    def enter(self, hang_up: Callable[[], None]) -> Viewer | None:
        """Return a new viewer, None when there are too many; one that has been frozen for long gives way."""
        with self._lock:
            if len(self.viewers) >= self.most_viewers:
                now = self.clock()
                frozen = [v for v in self.viewers if v.begun is not None and now - v.begun > FROZEN_SECONDS]
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
        """Let every viewer end, those too whose client does not read."""
        self.closed = True
        with self._lock:
            for viewer in self.viewers:
                if viewer.begun is not None:
                    viewer.hang_up()

    def entries(self) -> list[Entry]:
        """Return what is kept, oldest first."""
        return sorted(filter(None, self._ring), key=lambda entry: entry.number)

    @property
    def steps(self) -> int:
        """The number of the last step."""
        return self._n

    def since(self, number: int, most: int) -> Iterable[Entry]:
        """Yield at most so many entries from a number on; from the oldest, when that one has been overwritten."""
        for _ in range(most):
            entry = self._ring[number % self.kept]
            if entry is None or entry.number < number:
                return
            if entry.number > number:  # leave room for what is written meanwhile
                number = self._newest - self.kept + 1 + self.kept // 8
                entry = self._ring[number % self.kept]
                if entry is None or entry.number != number:
                    return
            yield entry
            number += 1
