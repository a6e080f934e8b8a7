"""The front end's side of its link: what stands for the engine in its process."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from api.service import LoadedEngine, Service
from batching import BatchingManager
from launch import plugin
from launch.engine import inference_maker
from launch.front_ends import wire
from launch.front_ends.channel import SharedPlaces
from launch.front_ends.workers import PassOn
from observe.meters import Meters
from scheduling.pages import PagePool
from serving.call import Call
from serving.inbox import Inbox
from serving.inference import Inference, InferenceError, failure
from serving.loop import complete, notify
from serving.programs import Programs
from serving.wakeup import Wakeup

log = logging.getLogger(__name__)

CLOSING = "its process has ended"
# Options of what a front end passes on: those that it has if they are not None, and those that it has if they are true.
GIVEN = ("grammar", "logprobs", "prompt_logprobs", "pooling", "adapter")
TRUE = ("embeds", "scores_prompt", "is_background", "tenant")


class Elsewhere:
    """A part that only the engine's process has: who asks for it is passed on."""

    def __getattr__(self, name: str) -> Any:
        raise PassOn


class Names(Programs):
    """Leaves it to the engine's process which program a request serves, as other front ends have calls of it, too."""

    def begin(self, program: str = "", session: str = "", parent: str = "") -> Call:
        return Call(program, session, parent, 0, ())


class SentMeters(Meters):
    """Passes the counts of a front end's HTTP requests on to the engine's process."""

    def __init__(self, send: Callable[[], None]) -> None:
        super().__init__()
        self._send = send
        self.calls: deque[tuple[Any, ...]] = deque()

    def arrived(self, n: int = 1) -> None:
        self.calls.append(("arrived", n))

    def answered(self, *answer: Any, **more: Any) -> None:
        self.calls.append(("answered", *answer, *more.values()))
        self._send()


class FrontInbox(Inbox):
    """An inbox whose loop runs in another process."""

    def __init__(self, link: Link, places: SharedPlaces, max_tokens: float, pages: PagePool | None) -> None:
        super().__init__(1, max_tokens, pages)
        self.places, self._link, self.retry_seconds = places, link, 1
        self.by_id: dict[str, Inference] = {}

    def deliver(self, inferences: list[Inference]) -> bool:
        with self.changed:
            if self.is_closed:
                return False
            for inference in inferences:
                self.open[inference.sequence] = self.by_id[inference.id] = inference
                inference.is_received = True
        self._link.ask(inferences)
        return True

    def remove(self, ended: list[Inference]) -> None:
        self._link.end(ended)

    def has_lost(self, inference: Inference) -> bool:
        return False  # the other process looks after it

    def retry_after(self) -> int:
        return self.retry_seconds


class Link:
    """A link to the engine's process, for as long as that runs."""

    def __init__(self, service: Service, places: SharedPlaces, tokenizer: Any, sock: socket.socket) -> None:
        self.is_lost = False  # the other process has ended, while this one goes on
        self.carries = False  # whether requests may come; some policies tell clients what only that process knows
        self._service, self._places, self._tokenizer, self._sock = service, places, tokenizer, sock
        self._wakeup = Wakeup()
        self._asked: deque[tuple[Any, ...]] = deque()  # both have at most one entry for each place
        self._ended: deque[tuple[str, Any]] = deque()
        self._make: Callable[..., Inference] = plugin.read(os.environ).maker(inference_maker(tokenizer))

    def run(self) -> None:
        """Serve with the engine's process until it ends."""
        news = wire.messages(self._sock)
        if (facts := next(news, None)) is not None:
            engine = self._engine(**facts)
            manager, inbox = engine.manager, cast(FrontInbox, engine.manager.inbox)
            writer = threading.Thread(target=self._write, name="to-engine", daemon=True)
            for state, tokens, ended in news:
                if self._service.engine is not engine:
                    self._service.meters = SentMeters(self._wakeup.notify)
                    self._service.engine = engine
                    writer.start()
                self._note(manager, inbox, *state)
                self._take_in(manager, inbox, tokens, ended)
            if not inbox.is_closed:
                self.is_lost = not self._service.draining
            self.carries = False  # `service.engine` stays until the next one: handlers use it
            manager.give_up(CLOSING)
            self._wakeup.notify()
        self._sock.close()

    def _engine(self, has_adapters: bool, **facts: Any) -> LoadedEngine:
        """Return what the app takes for the engine."""
        config = self._service.config
        pages = PagePool(facts["n_pages"], facts["page_size"], prefix_cache=False, window=facts["window"])
        manager = BatchingManager(cast(Any, None), make_inference=self._make_inference)
        manager.inbox = FrontInbox(self, self._places, config.max_queue_tokens, pages)
        manager._thread = threading.current_thread()
        manager.listeners.append(self._service.registry.on_arrival)
        manager.on_leave.append(self._service.registry.observe)
        return LoadedEngine(
            **facts, model=cast(Any, None), tokenizer=self._tokenizer, manager=manager, make_inference=self._make_inference,
            adapters=cast(Any, Elsewhere()) if has_adapters else None, grammars=cast(Any, Elsewhere()),
        )  # fmt: skip

    def _make_inference(self, prompt: str, length: int, ids: list[int] | None = None, **options: Any) -> Inference:
        """Return an inference that knows how to ask for itself; raise PassOn for one that is not plain."""
        others = any(options.get(name) is not None for name in GIVEN) or any(map(options.get, TRUE))
        if others or "/" in options["id"]:  # another answer to the same request
            raise PassOn
        inference = self._make(prompt, length, ids, **options)
        context = self._service.registry.context(inference.id)
        call: Call | None = options.pop("call", None)
        for name in ("id", "wakeup", "on_end"):
            del options[name]
        prompt = prompt if self._service.config.dashboard_show_text else ""
        follows = inference.wakeup is not None or context.ends_early
        inference.asked = (  # type: ignore[attr-defined]
            inference.id, context.id, prompt, wire.packed(inference.sequence.prompt_ids), length, follows,
            call and (call.program, call.session, call.parent), options,
        )  # fmt: skip
        return inference

    def ask(self, inferences: list[Inference]) -> None:
        """Send requests."""
        self._asked.extend(inference.__dict__.pop("asked") for inference in inferences)
        self._wakeup.notify()

    def end(self, inferences: list[Inference]) -> None:
        """Tell of requests that ended before their last token."""
        self._ended.extend((inference.id, wire.reason(inference.error)) for inference in inferences)
        self._wakeup.notify()

    def _write(self) -> None:
        meters = cast(SentMeters, self._service.meters)
        while self._service.meters is meters and not self.is_lost:
            self._wakeup.wait(1.0)
            # The requests last: that of each end is among them, or was sent before.
            new = [[each.popleft() for _ in range(len(each))] for each in (self._ended, meters.calls, self._asked)]
            try:
                wire.send(self._sock, new)
            except OSError:
                return

    def _note(
        self, manager: BatchingManager, inbox: FrontInbox, heartbeat: float, queued: int, retry_seconds: int,
        ended: str | None, can_repeat: bool, policy: tuple[str, bool, tuple[str, ...]] | None,
    ) -> None:  # fmt: skip
        """Note the state of the loop."""
        inbox.heartbeat, inbox.queued_tokens, inbox.retry_seconds = heartbeat, queued, retry_seconds
        if policy is not None:
            name, estimates, uses = policy
            self.carries = not estimates
            claims = SimpleNamespace(uses=uses)
            manager._first_policy = cast(Any, SimpleNamespace(name=name, estimates=False, claims=claims))
        if ended is not None and not inbox.is_closed:
            self.is_lost = can_repeat
            manager.give_up(ended)

    def _take_in(self, manager: BatchingManager, inbox: FrontInbox, tokens: Any, ended: Any) -> None:
        """Do what the loop does after a step: tell those who wait of new tokens, and of what has ended."""
        for id, data in tokens:
            if (inference := inbox.by_id.get(id)) is not None:
                _extend(inference, data)
                inference.publish_tokens()
        sequences = []
        for id, data, error, values in ended:
            if (inference := inbox.by_id.pop(id, None)) is None:
                continue
            _extend(inference, data)
            seq = inference.sequence
            for name, value in zip(wire.FIELDS, values):
                setattr(seq, name, value)
            seq.error = None if error is None else InferenceError(*error)
            seq.state = "finished"
            sequences.append(seq)
        if left := inbox.finish(sequences):
            notify(manager.on_leave, None, left)
            complete(left)
        if tokens:
            self._service.socket_writer.observe(True, left)


def _extend(inference: Inference, data: bytes) -> None:
    seq = inference.sequence
    try:
        for token in wire.unpacked(data):
            seq.output_ids.append(token)
            if seq.stop is not None:
                seq.stop(token)  # which notes where the text ends, as it did in the other process
    except Exception as error:  # of one text, which the others must survive
        log.exception("cannot read the tokens of a request")
        inference.cancel(failure(error))
