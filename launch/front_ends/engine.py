"""The engine's side of its links to front ends: their requests enter the queue as inferences, as those of handlers do."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from api.service import LoadedEngine, Service
from launch.front_ends import wire
from launch.front_ends.channel import ENGINE, Channel, SharedPlaces
from scheduling.iteration import Iteration
from scheduling.sequence import Sequence
from serving.inference import Inference, InferenceError, cancel_all, failure
from serving.recovery import blames_kernels
from serving.wakeup import Wakeup

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5  # between two messages without a step, so that a front end notices a loop that hangs
fields_of = attrgetter(*wire.FIELDS)


class FrontEnds:
    """All links of the engine's process, which wait until that has an engine."""

    engine: LoadedEngine

    def __init__(self, service: Service) -> None:
        self.service = service
        self.links: list[Link] = []
        self.asked_by: dict[str, tuple[Link, str]] = {}  # by the id of an inference: who asked, and its id there
        self.ready = threading.Event()

    def connect(self, engine: LoadedEngine, channel: Channel) -> None:
        """Share the places of an engine that has not lent any, and observe its loop."""
        self.engine, inbox = engine, engine.manager.inbox
        inbox.places = self.places = SharedPlaces(channel, ENGINE, inbox.places.limit)
        engine.manager.observers.append(self._observe)

    def link(self, sock: socket.socket, number: int) -> None:
        """Serve the front end of this number, which has opened a link."""
        link = Link(self, sock, number)
        self.links.append(link)
        threading.Thread(target=link.read, name=f"front-{number}", daemon=True).start()

    def _observe(self, iteration: Iteration | None, left: list[Inference]) -> None:
        """Have the links send what is new; called in the loop's thread."""
        for inference in left:
            if asked := self.asked_by.pop(inference.id, None):
                (link, id), seq = asked, inference.sequence
                link.ended.append((id, seq, inference.error or failure(seq.error)))
        for link in self.links:
            if link.ended or link.streams:
                link.wakeup.notify()

    def close(self, link: Link) -> None:
        """Cancel the requests of a front end that has gone, and free its places."""
        self.links.remove(link)
        for _ in range(link.unanswered):
            self.service.meters.answered("other", 499, None, 0, [], generates=True)
        error = InferenceError("cancelled", "its front end has ended")
        cancel_all([(inference, error) for inference in link.open.copy().values()])
        if all(other.number != link.number for other in self.links):  # or it took its own place, with places of its own
            self.places.free(link.number)


class Link:
    """The link to one front end: a thread reads its requests, and one sends what is new after each step."""

    def __init__(self, front_ends: FrontEnds, sock: socket.socket, number: int) -> None:
        self.number = number
        self.wakeup = Wakeup()
        # By the front end's ids. The loop appends to `ended`; what has ended leaves the others when it is sent.
        self.open: dict[str, Inference] = {}
        self.streams: dict[str, int] = {}  # and how many of its tokens were sent
        self.ended: deque[tuple[str, Sequence, InferenceError | None]] = deque()
        self.unanswered = 0  # HTTP requests
        self._front_ends = front_ends
        self._sock = sock

    def read(self) -> None:
        """Take in what the front end sends, until it ends."""
        self._front_ends.ready.wait()
        threading.Thread(target=self._write, name=f"to-front-{self.number}", daemon=True).start()
        acts: dict[str, Callable[..., None]] = {"ask": self._ask, "end": self._end, "count": self._count}
        try:
            for entries in wire.messages(self._sock):
                for act, *values in entries:
                    acts[act](*values)
        finally:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # which ends the other thread
            self._front_ends.close(self)

    def _ask(
        self, id: str, name: str, prompt: str, ids: list[int], length: int, follows: bool, call: Any, options: Any
    ) -> None:
        """Put a request into the queue; `name` is the id by which clients know it, `follows` whether its tokens are sent."""
        service, engine, asked_by = self._front_ends.service, self._front_ends.engine, self._front_ends.asked_by
        name = service.registry.expect(name)
        asked_by[name] = self, id
        try:
            inference = self.open[id] = engine.make_inference(
                prompt, length, ids, id=name, wakeup=Wakeup() if follows else None,
                call=service.programs.begin(*call) if call else None, **options,
            )  # fmt: skip
            if follows:
                self.streams[id] = 0
            engine.manager.enqueue_all([inference])
        except Exception as error:
            del asked_by[name]
            service.registry.drop(name)
            if not isinstance(error, InferenceError):
                log.exception("a request of a front end failed")
            self.ended.append((id, Sequence([], 0), failure(error)))
            self.wakeup.notify()

    def _end(self, id: str, error: tuple[Any, ...] | None) -> None:
        """End a request before its last token, unless it has ended by itself."""
        if (inference := self.open.get(id)) is None:
            return
        if error is None:
            inference.end_early()
        else:
            inference.cancel(InferenceError(*error))

    def _count(self, name: str, *values: Any) -> None:
        """Make a call to the meters, which counts HTTP requests that came or were answered."""
        getattr(self._front_ends.service.meters, name)(*values)
        self.unanswered += values[0] if name == "arrived" else -values[-1]

    def _write(self) -> None:
        """Send what is new, until the front end ends."""
        with contextlib.suppress(OSError):
            wire.send(self._sock, {name: getattr(self._front_ends.engine, name) for name in wire.FACTS})
            while True:
                wire.send(self._sock, self._news())
                self.wakeup.wait(BEAT_SECONDS)

    def _news(self) -> tuple[Any, ...]:
        """Return the next message."""
        ended = []
        for _ in range(len(self.ended)):
            id, seq, error = self.ended.popleft()
            self.open.pop(id, None)
            ended.append((id, seq.output_ids[self.streams.pop(id, 0) :], wire.reason(error), fields_of(seq)))
        tokens = []
        for id, sent in list(self.streams.items()):
            inference = self.open.get(id)
            if inference is not None and (ready := inference.ready) > sent:
                tokens.append((id, inference.sequence.output_ids[sent:ready]))
                self.streams[id] = ready
        return self._state(), tokens, ended

    def _state(self) -> tuple[Any, ...]:
        """Return what a front end must know of the loop before its next request."""
        manager = self._front_ends.engine.manager
        inbox, policy = manager.inbox, manager.policy
        assert policy is not None
        uses = policy.claims.uses if manager.pages is None else (*policy.claims.uses, manager.pages.evict.uses)
        return (
            inbox.heartbeat, inbox.queued_tokens, inbox.retry_after(), inbox.places.limit,
            inbox.failure if inbox.is_closed else None, blames_kernels(manager.recovery.fatal),
            policy.name, policy.estimates, tuple(uses),
        )  # fmt: skip
