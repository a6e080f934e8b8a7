"""The front end's side of its link: what stands for the engine in its process."""

from __future__ import annotations

import contextlib
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


class SentMeters(Meters):
    """Passes the counts of a front end's HTTP requests on to the engine's process."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    def arrived(self, n: int = 1) -> None:
        self._link.outbox.append(("count", "arrived", n))  # which is sent with the request

    def answered(self, *answer: Any, **more: Any) -> None:
        self._link.send([("count", "answered", *answer, *more.values())])


class Link(Inbox):
    """A link to the engine's process, for as long as that runs: an inbox whose loop runs there."""

    def __init__(self, service: Service, places: SharedPlaces, tokenizer: Any, sock: socket.socket) -> None:
        super().__init__(1, service.config.max_queue_tokens)
        self.places, self.retry_seconds = places, 1
        self.is_lost = False  # the other process has ended, while this one goes on
        self.carries = False  # whether requests may come; some policies tell clients what only that process knows
        self.outbox: deque[tuple[Any, ...]] = deque()  # with a few entries for each place at most
        self._service, self._tokenizer, self._sock = service, tokenizer, sock
        self._wakeup = Wakeup()
        self._by_id: dict[str, Inference] = {}
        self._make: Callable[..., Inference] = plugin.read(os.environ).maker(inference_maker(tokenizer))

    def run(self) -> None:
        """Serve with the engine's process until it ends."""
        news = wire.messages(self._sock)
        if (facts := next(news, None)) is not None:
            engine = self._engine(**facts)
            for state, tokens, ended in news:
                if self._service.engine is not engine:
                    self._service.meters, self._service.engine = SentMeters(self), engine
                    threading.Thread(target=self._write, name="to-engine", daemon=True).start()
                self._note(engine.manager, *state)
                self._take_in(engine.manager, tokens, ended)
            if not self.is_closed:
                self.is_lost = not self._service.draining
            self.carries = False  # `service.engine` stays until the next one: handlers use it
            engine.manager.give_up(CLOSING)
            self._wakeup.notify()
        self._sock.close()

    def _engine(self, **facts: Any) -> LoadedEngine:
        """Return what the app takes for the engine."""
        config = self._service.config
        self._pages = PagePool(facts["n_pages"], facts["page_size"], prefix_cache=False, window=facts["window"])
        manager = BatchingManager(cast(Any, None), make_inference=self._make_inference)
        manager.inbox = self
        manager._thread = threading.current_thread()
        manager.listeners.append(self._service.registry.on_arrival)
        manager.on_leave.append(self._service.registry.observe)
        elsewhere = cast(Any, Elsewhere())
        return LoadedEngine(
            **facts, model=elsewhere, tokenizer=self._tokenizer, manager=manager, make_inference=self._make_inference,
            adapters=elsewhere if config.adapters or config.adapter_folders else None, grammars=elsewhere,
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
            inference.id, context.id, prompt, inference.sequence.prompt_ids, length, follows,
            call and (call.program, call.session, call.parent), options,
        )  # fmt: skip
        return inference

    def deliver(self, inferences: list[Inference]) -> bool:
        with self.changed:
            if self.is_closed:
                return False
            for inference in inferences:
                self.open[inference.sequence] = self._by_id[inference.id] = inference
                inference.is_received = True
        self.send([("ask", *inference.__dict__.pop("asked")) for inference in inferences])
        if any(inference.is_finished for inference in inferences):  # whose client has left in between
            self.remove(inferences)
        return True

    def remove(self, ended: list[Inference]) -> None:
        self.send([("end", inference.id, wire.reason(inference.error)) for inference in ended])

    def retry_after(self) -> int:
        return self.retry_seconds

    def send(self, entries: list[tuple[Any, ...]]) -> None:
        """Send requests, ends of requests, and counts."""
        self.outbox.extend(entries)
        self._wakeup.notify()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the other process has ended
            while True:
                self._wakeup.wait(1.0)
                wire.send(self._sock, [self.outbox.popleft() for _ in range(len(self.outbox))])

    def _note(
        self, manager: BatchingManager, heartbeat: float, queued: int, retry_seconds: int, limit: int, ended: str | None,
        can_repeat: bool, name: str, estimates: bool, uses: tuple[str, ...],
    ) -> None:  # fmt: skip
        """Note the state of the loop."""
        self.heartbeat, self.queued_tokens, self.retry_seconds = heartbeat, queued, retry_seconds
        self.places.limit, self.carries = limit, not estimates
        policy = SimpleNamespace(name=name, estimates=False, claims=SimpleNamespace(uses=uses))
        manager._first_policy = cast(Any, policy)
        if ended is not None and not self.is_closed:
            self.is_lost = can_repeat
            manager.give_up(ended)

    def _take_in(self, manager: BatchingManager, tokens: Any, ended: Any) -> None:
        """Do what the loop does after a step: tell those who wait of new tokens, and of what has ended."""
        for id, new in tokens:
            if (inference := self._by_id.get(id)) is not None:
                _extend(inference, new)
                inference.publish_tokens()
        sequences = []
        for id, new, error, values in ended:
            if (inference := self._by_id.pop(id, None)) is None:
                continue
            _extend(inference, new)
            seq = inference.sequence
            for name, value in zip(wire.FIELDS, values):
                setattr(seq, name, value)
            seq.error = None if error is None else InferenceError(*error)
            seq.state = "finished"
            sequences.append(seq)
        if left := self.finish(sequences):
            notify(manager.on_leave, None, left)
            complete(left)
        if tokens:
            self._service.socket_writer.observe(True, left)


def _extend(inference: Inference, tokens: list[int]) -> None:
    seq = inference.sequence
    try:
        for token in tokens:
            seq.output_ids.append(token)
            if seq.stop is not None:
                seq.stop(token)  # which notes where the text ends, as it did in the other process
    except Exception as error:  # of one text, which the others must survive
        log.exception("cannot read the tokens of a request")
        inference.cancel(failure(error))
