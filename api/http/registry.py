"""The registry of generating HTTP requests, from admission to the last byte, and the records of `/requests/<id>`.

A visit owns its places in the queue, its inferences, and the watch on its client, and releases all of them exactly
once. This module must not know how a request is computed, and keeps no text.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from flask import g, has_request_context, request

from api.http.watcher import Watcher
from batching import Inference, InferenceError, outcome
from serving.inference import cancel_all

Waited = Callable[[Inference], Mapping[str, tuple[int, float]]]
KEPT = 1000  # finished requests that can still be looked up
PREFIXES = ("chatcmpl-", "cmpl-")  # what an id in an answer has before ours


class Places:
    """A counter of places that any thread may take and give back."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.taken = 0
        self._lock = threading.Lock()

    def take(self, n: int = 1) -> bool:
        """Take `n` places or none."""
        with self._lock:
            if self.taken + n > self.total:
                return False
            self.taken += n
            return True

    def give_back(self, n: int = 1) -> None:
        with self._lock:
            self.taken -= n


class Visit:
    """One request: `name` is its id, made unique if another request has the same id."""

    def __init__(self, id: str, name: str, path: str, give_back: Callable[[int], None]) -> None:
        self.id = id
        self.name = name
        self.path = path
        self.places = 1
        self.inferences: list[Inference] = []
        self.running = 0  # inferences that the loop still has
        self.may_wait: float | None = None
        self.may_take: float | None = None
        self.gone = False
        self.left = False
        self.streams = False
        self.watched: int | None = None
        self._give_back = give_back
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        return any(not inference.is_finished for inference in self.inferences)

    def end(self, error: InferenceError) -> None:
        cancel_all((inference, error) for inference in self.inferences)

    def leave(self) -> bool:
        """Release everything; return False if that has already been done."""
        with self._lock:
            if self.left:
                return False
            self.left = True
        self._give_back(self.places)
        if self.is_open:  # a handler that ends while they run has nobody to give them to
            self.gone = self.gone or self.streams
            kind = "cancelled" if self.gone else "abandoned"
            self.end(InferenceError(kind, "the request was abandoned"))
        return True


class Visits:
    """The open requests, and the last finished ones."""

    def __init__(self, watcher: Watcher, clock: Callable[[], float] = time.perf_counter) -> None:
        self._watcher = watcher
        self._lock = threading.Lock()
        self._open: dict[str, Visit] = {}
        self._of: dict[str, Visit] = {}  # by the id of an inference that the loop has
        self._done: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._latest: dict[str, str] = {}  # the name of the last visit that sent an id
        self._numbers = count(2)
        self._epoch = time.time() - clock()
        # What says for which reasons an inference has waited until now: the loop, once there is one.
        self.waited: Waited = lambda inference: inference.sequence.waited

    @property
    def open(self) -> int:
        """The number of open requests."""
        return len(self._open)

    def enter(self, id: str, path: str, give_back: Callable[[int], None]) -> Visit:
        """Register a request that has its place, and return its visit."""
        with self._lock:
            taken = id in self._open or id in self._done
            name = f"{id}~{next(self._numbers)}" if taken else id  # no client's id has a tilde
            visit = self._open[name] = Visit(id, name, path, give_back)
            self._latest[id] = name
        return visit

    def rename(self, visit: Visit, id: str) -> None:
        """Give a visit the id from its body."""
        with self._lock:
            self._forget(visit.id, visit.name)
            visit.id = id
            self._latest[id] = visit.name

    def on_arrival(self, inference: Inference) -> None:
        """Record the visit of an accepted inference; called in the handler's thread."""
        visit: Visit | None = g.get("visit") if has_request_context() else None
        if visit is None:
            return
        n = len(visit.inferences)
        inference.id = inference.sequence.id = visit.name if n == 0 else f"{visit.name}/{n}"
        inference.may_wait, inference.may_take = visit.may_wait, visit.may_take
        with self._lock:
            self._of[inference.id] = visit
            visit.running += 1
        visit.inferences.append(inference)
        sock = request.environ.get("gunicorn.socket")
        if n == 0 and sock is not None:
            visit.watched = self._watcher.add(sock, self._hang_up, visit)

    @staticmethod
    def _hang_up(visits: list[Visit]) -> None:
        """Cancel the requests of clients that have disconnected."""
        left = [visit for visit in visits if visit.is_open]
        for visit in left:
            visit.gone = True
        cancel_all(
            (inference, InferenceError("cancelled", "the client disconnected"))
            for visit in left
            for inference in visit.inferences
        )

    def observe(self, iteration: Any, left: list[Inference]) -> None:
        """Record the inferences that left the loop; called in the loop's thread."""
        if not left:
            return
        with self._lock:
            for inference in left:
                visit = self._of.pop(inference.id, None)
                if visit is None:
                    continue
                visit.running -= 1
                if visit.running == 0:
                    self._keep(visit)

    def leave(self, visit: Visit) -> bool:
        """End a visit; return False if it has already ended."""
        if visit.watched is not None:
            self._watcher.remove(visit.watched)
        if not visit.leave():
            return False
        with self._lock:
            if visit.running == 0:
                self._open.pop(visit.name, None)
                if visit.name not in self._done:  # it was refused, so there is nothing to look up
                    self._forget(visit.id, visit.name)
        return True

    def _keep(self, visit: Visit) -> None:
        self._done[visit.name] = self._describe(visit)
        self._done.move_to_end(visit.name)
        if visit.left:
            self._open.pop(visit.name, None)
        while len(self._done) > KEPT:
            old, record = self._done.popitem(last=False)
            self._forget(record["id"], old)

    def _forget(self, id: str, name: str) -> None:
        """Remove the entry of an id if it refers to this visit."""
        if self._latest.get(id) == name:
            del self._latest[id]

    def find(self, id: str) -> dict[str, Any] | None:
        """Return the record of the latest request with this id."""
        for known in (id, *(id.removeprefix(p) for p in PREFIXES if id.startswith(p))):
            with self._lock:
                name = self._latest.get(known, known)
                visit = self._open.get(name)
                done = self._done.get(name)
            if visit is not None and (visit.running or done is None):
                return self._describe(visit)
            if done is not None:
                return done
        return None

    def cancel(self, id: str) -> str | None:
        """Cancel the requests with this id; return their resulting state, or None if there are none."""
        found = self.find(id)
        if found is None:
            return None
        with self._lock:
            visits = [visit for visit in self._open.values() if visit.id == found["id"]]
        for visit in visits:
            visit.end(InferenceError("cancelled", "the request was cancelled by DELETE /requests/<id>"))
        found = self.find(id) or found
        return "cancelled" if found["finish_reason"] == "cancelled" else found["state"]

    def _describe(self, visit: Visit) -> dict[str, Any]:
        choices = [self._timeline(inference) for inference in visit.inferences]
        if len(choices) == 1:
            return {"id": visit.id, **choices[0]}
        states = [choice["state"] for choice in choices]
        order = ("running", "held", "waiting", "finished")
        return {
            "id": visit.id,
            "state": next((state for state in order if state in states), "waiting"),
            "finish_reason": choices[0]["finish_reason"] if choices else None,
            "choices": choices,
        }

    def _timeline(self, inference: Inference) -> dict[str, Any]:
        seq = inference.sequence

        def wall(moment: float | None) -> float | None:
            return None if moment is None else self._epoch + moment

        ended = seq.state == "finished" or inference.is_finished
        return {
            "state": "finished" if ended else seq.state,
            "finish_reason": outcome(inference) if ended else None,
            "prompt_tokens": len(seq.prompt_ids),
            "output_tokens": len(inference.output_ids),
            "cached_tokens": seq.cached,
            "arrived_at": wall(seq.arrived_at),
            "scheduled_at": wall(seq.scheduled_at),
            "first_token_at": wall(seq.first_token_at),
            "finished_at": wall(seq.finished_at),
            "iterations": [seq.first_iteration, seq.last_iteration] if seq.first_iteration else None,
            "batch": {"mean": seq.batch_sum / seq.iterations if seq.iterations else 0, "max": seq.batch_max},
            "waited": [
                {"reason": reason, "iterations": iterations, "seconds": seconds}
                for reason, (iterations, seconds) in list(self.waited(inference).items())
            ],
        }
