"""The registry of generating HTTP requests, from admission to the last byte, and the records of `/requests/<id>`.

A request context owns its place, its inferences, and the watch on its client, and releases all of them exactly once. This module must not know how a request is computed, and keeps no text.
"""

from __future__ import annotations

import math
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
from serving.places import Place
from serving.programs import Programs

Waited = Callable[[Inference], Mapping[str, tuple[int, float]]]
KEPT = 1000  # finished requests that can still be looked up
PREFIXES = ("chatcmpl-", "cmpl-", "resp_")  # of ids in OpenAI's answers


class RequestContext:
    """One request: `name` is its id, made unique if another request has the same id.

    A request of the server itself, such as one of the demo load, has no handler and no client, so it has left from the
    start. Without a `place`, the inbox takes one for each inference.
    """

    def __init__(
        self, id: str, name: str, place: Place | None, has_client: bool, is_background: bool, tenant: str
    ) -> None:
        self.id = id
        self.tenant = tenant
        self.is_background = is_background
        self.name = name
        self.has_client = has_client
        self.place = place
        self.inferences: list[Inference] = []
        self.running = 0  # inferences that the loop still has
        self.queue_timeout = math.inf  # seconds, where the client asks for less than the server grants
        self.request_timeout = math.inf
        self.gone = False
        self.left = not has_client
        self.streams = self.ends_early = False
        self.watched: int | None = None

    @property
    def is_open(self) -> bool:
        return any(not inference.is_finished for inference in self.inferences)

    def inference_options(self, index: int) -> dict[str, Any]:
        """Return what this request's inference `index` has from it: an id, time limits, a tenant, and its place."""
        return {
            "id": self.name if index == 0 else f"{self.name}/{index}",
            "queue_timeout": self.queue_timeout,
            "request_timeout": self.request_timeout,
            "tenant": self.tenant,
            "is_background": self.is_background,
            "has_place": self.place is not None and index < self.place.count,
        }

    def end(self, error: InferenceError) -> None:
        cancel_all((inference, error) for inference in self.inferences)


class RequestRegistry:
    """The open requests, and the last finished ones."""

    def __init__(
        self, watcher: Watcher, programs: Programs | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._watcher = watcher
        self._programs = programs or Programs()
        self._lock = threading.Lock()
        self._open: dict[str, RequestContext] = {}
        self._of: dict[str, RequestContext] = {}  # by the id of an inference that the loop has
        self._done: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._latest: dict[str, str] = {}  # the name of the latest request with this id
        self._numbers = count(2)
        self._epoch = time.time() - clock()
        # Returns why an inference has waited so far; the loop replaces it.
        self.waited: Waited = lambda inference: inference.sequence.waited

    @property
    def open(self) -> int:
        """The number of open requests of clients."""
        with self._lock:
            return sum(context.has_client for context in self._open.values())

    def enter(
        self, id: str, place: Place | None = None, *, has_client: bool = True, is_background: bool = False,
        tenant: str = "",
    ) -> RequestContext:  # fmt: skip
        """Return the context of a request, which holds the place that was lent to it."""
        with self._lock:
            taken = id in self._open or id in self._done
            name = f"{id}~{next(self._numbers)}" if taken else id  # no client's id has a tilde
            context = self._open[name] = RequestContext(id, name, place, has_client, is_background, tenant)
            self._latest[id] = name
            if place is not None:
                place.is_claimed = True
        return context

    def context(self, name: str) -> RequestContext:
        """Return the open request of this name."""
        return self._open[name]

    def expect(self, id: str) -> str:
        """Return the name of a request that another process has accepted; `on_arrival` or `drop` follows."""
        context = self.enter(id)
        context.left = True  # its client is that process's
        self._of[context.name] = context
        return context.name

    def drop(self, name: str) -> None:
        """Forget an expected request that was refused."""
        with self._lock:
            context = self._of.pop(name)
            del self._open[name]
            self._forget(context.id, name)

    def rename(self, context: RequestContext, id: str) -> None:
        """Change the id of a request to the one in its body."""
        with self._lock:
            self._forget(context.id, context.name)
            context.id = id
            self._latest[id] = context.name

    def on_arrival(self, inference: Inference) -> None:
        """Assign an accepted inference to the current request, or to one of its own; called in the sender's thread."""
        current: RequestContext | None = g.get("context") if has_request_context() else None
        context = current or self._of.get(inference.id) or self.enter(inference.id, has_client=False)
        with self._lock:
            self._of[inference.id] = context
            context.running += 1
        context.inferences.append(inference)
        sock = request.environ.get("gunicorn.socket") if current is not None else None
        if context.watched is None and sock is not None:
            context.watched = self._watcher.add(sock, self._hang_up, context)

    @staticmethod
    def _hang_up(contexts: list[RequestContext]) -> None:
        """Cancel the requests of clients that have disconnected."""
        left = [context for context in contexts if context.is_open]
        for context in left:
            context.gone = True
        cancel_all(
            (inference, InferenceError("cancelled", "the client disconnected"))
            for context in left
            for inference in context.inferences
        )

    def observe(self, iteration: Any, left: list[Inference]) -> None:
        """Record the inferences that left the loop; called in the loop's thread."""
        for inference in left:
            if inference.call is not None:  # first, since what is kept of a request names what its program received
                self._programs.charge(inference, inference.call)
        with self._lock:
            for inference in left:
                context = self._of.pop(inference.id, None)
                if context is None:
                    continue
                context.running -= 1
                if context.running == 0:
                    self._keep(context)

    def leave(self, context: RequestContext) -> bool:
        """End a request; return False if it has already ended."""
        if context.watched is not None:
            self._watcher.remove(context.watched)
        with self._lock:
            if context.left:
                return False
            context.left = True
            if context.running == 0:
                self._close(context)
                if context.name not in self._done:  # it was rejected, so there is no record of it
                    self._forget(context.id, context.name)
        if context.running and context.is_open:  # the handler ended, so no client will read the answer
            context.gone = context.gone or context.streams
            kind = "cancelled" if context.gone else "abandoned"
            context.end(InferenceError(kind, "the request was abandoned"))
        return True

    def _keep(self, context: RequestContext) -> None:
        self._done[context.name] = self._describe(context)
        self._done.move_to_end(context.name)
        if context.left:
            self._close(context)
        while len(self._done) > KEPT:
            old, record = self._done.popitem(last=False)
            self._forget(record["id"], old)

    def _close(self, context: RequestContext) -> None:
        """Forget an open request that has neither a client nor an inference in the loop, and give back its place."""
        # Both conditions: a client that hangs up leaves its inferences in the loop until the step has ended, and
        # clients that connect and hang up must not fill the loop meanwhile.
        self._open.pop(context.name, None)
        if context.place is not None:
            context.place.give_back()

    def _forget(self, id: str, name: str) -> None:
        """Remove the entry of an id if it refers to this request."""
        if self._latest.get(id) == name:
            del self._latest[id]

    def find(self, id: str) -> dict[str, Any] | None:
        """Return the record of the latest request with this id."""
        for known in (id, *(id.removeprefix(p) for p in PREFIXES if id.startswith(p))):
            with self._lock:
                name = self._latest.get(known, known)
                context = self._open.get(name)
                done = self._done.get(name)
            if context is not None and (context.running or done is None):
                return self._describe(context)
            if done is not None:
                return done
        return None

    def cancel(self, id: str) -> str | None:
        """Cancel the requests with this id; return their resulting state, or None if there are none."""
        record = self.find(id)
        if record is None:
            return None
        with self._lock:
            contexts = [context for context in self._open.values() if context.id == record["id"]]
        for context in contexts:
            context.end(InferenceError("cancelled", "the request was cancelled by DELETE /requests/<id>"))
        record = self.find(id) or record
        return "cancelled" if record["finish_reason"] == "cancelled" else record["state"]

    def _describe(self, context: RequestContext) -> dict[str, Any]:
        choices = [self._timeline(inference) for inference in context.inferences]
        if len(choices) == 1:
            return {"id": context.id, **choices[0]}
        states = [choice["state"] for choice in choices]
        order = ("running", "held", "waiting", "finished")
        return {
            "id": context.id,
            "state": next((state for state in order if state in states), "waiting"),
            "finish_reason": choices[0]["finish_reason"] if choices else None,
            "choices": choices,
        }

    def _timeline(self, inference: Inference) -> dict[str, Any]:
        seq = inference.sequence
        names = ("arrived_at", "scheduled_at", "first_token_at", "finished_at")
        ended = seq.state == "finished" or inference.is_finished
        waited = seq.waited if ended else self.waited(inference)
        return {
            "state": "finished" if ended else seq.state,
            "finish_reason": outcome(inference) if ended else None,
            "prompt_tokens": len(seq.prompt_ids),
            "output_tokens": len(inference.output_ids),
            "cached_tokens": seq.cached,
            "drafted_tokens": seq.drafted,
            "accepted_tokens": seq.accepted,
            "program": None if inference.call is None else self._programs.describe(inference.call),
            "computed_as": None if inference.first is None else inference.first.id,
            **{name: None if (at := getattr(seq, name)) is None else self._epoch + at for name in names},
            "iterations": [seq.first_iteration, seq.last_iteration] if seq.first_iteration else None,
            "batch": {"mean": seq.batch_sum / seq.iterations if seq.iterations else 0, "max": seq.batch_max},
            "blame": f"/requests/{inference.id}/blame" if ended and inference.first is None else None,
            "waited": [
                {"reason": reason, "iterations": iterations, "seconds": seconds}
                for reason, (iterations, seconds) in list(waited.items())
            ],
        }
