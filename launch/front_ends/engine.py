"""The engine's side of its links to front ends: their requests enter the queue as inferences, as those of handlers do."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from operator import attrgetter
from typing import Any

from api.service import LoadedEngine, Service
from launch.front_ends import wire
from launch.front_ends.channel import ENGINE, Channel, FormerPlaces, SharedPlaces
from scheduling.iteration import Iteration
from serving.inference import Inference, InferenceError, cancel_all, failure
from serving.recovery import blames_kernels
from serving.wakeup import Wakeup

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5  # between two messages without a step, so that a front end notices a loop that hangs
fields_of = attrgetter(*wire.FIELDS)


class FrontEnds:
    """All links of the engine's process. `service` has its engine when the first one begins."""

    def __init__(self, service: Service, channel: Channel) -> None:
        self.service = service
        self.links: list[Link] = []
        self.asked_by: dict[str, tuple[Link, str]] = {}  # by the id of an inference: who asked, and its id there
        self.ready = threading.Event()
        self._places = SharedPlaces(channel, ENGINE)

    def begin(self, engine: LoadedEngine) -> None:
        """Let front ends take places and send requests."""
        inbox = engine.manager.inbox
        former: Any = inbox.places
        with former.lock:
            self._places.limit, own = former.limit, former.taken
            self._places.give_back(-own)
            inbox.places = former.successor = self._places
            former.__class__ = FormerPlaces  # handlers have some: they have seen the engine since before
        engine.manager.observers.append(self._observe)
        self.ready.set()

    def link(self, sock: socket.socket, number: int) -> None:
        """Serve the front end of this number, which has opened a link."""
        link = Link(self, sock, number)
        self.links.append(link)
        threading.Thread(target=link.read, name=f"front-{number}", daemon=True).start()

    @property
    def open(self) -> int:
        """The number of requests that front ends wait for."""
        return sum(len(link.open) for link in self.links)

    def _observe(self, iteration: Iteration | None, left: list[Inference]) -> None:
        """Have the links send what is new; called in the loop's thread."""
        for inference in left:
            if asked := self.asked_by.pop(inference.id, None):
                link, id = asked
                link.ended.append((id, inference))
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
            self._places.free(link.number)


class Link:
    """The link to one front end: a thread reads its requests, and one sends what is new after each step."""

    def __init__(self, front_ends: FrontEnds, sock: socket.socket, number: int) -> None:
        self.number = number
        self.wakeup = Wakeup()
        # By the front end's ids. The loop appends to `ended`; what has ended leaves the others when it is sent.
        self.open: dict[str, Inference] = {}
        self.streams: dict[str, int] = {}  # and how many of its tokens were sent
        self.ended: deque[tuple[str, Inference | InferenceError]] = deque()
        self.unanswered = 0  # HTTP requests
        self._front_ends = front_ends
        self._sock = sock
        self._policy: Any = None  # that the front end knows

    def read(self) -> None:
        """Take in what the front end sends, until it ends."""
        self._front_ends.ready.wait()
        threading.Thread(target=self._write, name=f"to-front-{self.number}", daemon=True).start()
        meters = self._front_ends.service.meters
        try:
            for ended, counted, asked in wire.messages(self._sock):
                for request in asked:
                    self._ask(*request)
                # Looked up once, since the other thread forgets what it has sent.
                known = [(found, error) for id, error in ended if (found := self.open.get(id)) is not None]
                cancel_all([(inference, InferenceError(*error)) for inference, error in known if error])
                for inference in [inference for inference, error in known if error is None]:
                    inference.end_early()
                for name, *values in counted:
                    getattr(meters, name)(*values)
                    self.unanswered += values[0] if name == "arrived" else -values[-1]
        finally:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # which ends the other thread
            self._front_ends.close(self)

    def _ask(
        self, id: str, name: str, prompt: str, ids: bytes, length: int, follows: bool, call: Any, options: Any
    ) -> None:
        """Put a request into the queue; `name` is the id by which clients know it, `follows` whether its tokens are sent."""
        service, asked_by = self._front_ends.service, self._front_ends.asked_by
        assert service.engine is not None
        name = service.registry.expect(name)
        asked_by[name] = self, id
        try:
            inference = self.open[id] = service.engine.make_inference(
                prompt, length, wire.unpacked(ids), id=name, wakeup=Wakeup() if follows else None,
                call=service.programs.begin(*call) if call else None, **options,
            )  # fmt: skip
            if follows:
                self.streams[id] = 0
            service.engine.manager.enqueue_all([inference])
        except Exception as error:
            del asked_by[name]
            service.registry.drop(name)
            if not isinstance(error, InferenceError):
                log.exception("a request of a front end failed")
            self.ended.append((id, failure(error) or InferenceError("server_error", "")))
            self.wakeup.notify()

    def _write(self) -> None:
        """Send what is new, until the front end ends."""
        engine = self._front_ends.service.engine
        facts = {name: getattr(engine, name) for name in wire.FACTS}
        try:
            wire.send(self._sock, facts | {"has_adapters": engine is not None and engine.adapters is not None})
            while True:
                wire.send(self._sock, self._news())
                self.wakeup.wait(BEAT_SECONDS)
        except OSError:
            return

    def _news(self) -> tuple[Any, ...]:
        """Return the next message."""
        ended = []
        for _ in range(len(self.ended)):
            id, what = self.ended.popleft()
            self.open.pop(id, None)
            sent = self.streams.pop(id, 0)
            if isinstance(what, InferenceError):  # it was refused
                ended.append((id, b"", wire.reason(what), ()))
                continue
            seq = what.sequence
            error = what.error or failure(seq.error)
            ended.append((id, wire.packed(seq.output_ids[sent:]), wire.reason(error), fields_of(seq)))
        tokens = []
        for id, sent in list(self.streams.items()):
            inference = self.open.get(id)
            if inference is not None and (ready := inference.ready) > sent:
                tokens.append((id, wire.packed(inference.sequence.output_ids[sent:ready])))
                self.streams[id] = ready
        return self._state(), tokens, ended

    def _state(self) -> tuple[Any, ...]:
        """Return what a front end must know of the loop before its next request."""
        engine = self._front_ends.service.engine
        assert engine is not None
        manager, inbox = engine.manager, engine.manager.inbox
        policy, self._policy = self._policy, manager.policy
        news = None
        if self._policy is not None and policy is not self._policy:
            evict = () if manager.pages is None else (manager.pages.evict.uses,)
            news = self._policy.name, self._policy.estimates, (*self._policy.claims.uses, *evict)
        ended = inbox.failure if inbox.is_closed else None
        can_repeat = ended is not None and blames_kernels(manager.recovery.fatal)
        return inbox.heartbeat, inbox.queued_tokens, inbox.retry_after(), ended, can_repeat, news
