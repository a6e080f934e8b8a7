"""The state that handlers share: one object, assembled by `app.py`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from api.http.deferral import Completer
from api.http.openapi import Operation
from api.http.registry import RequestRegistry
from api.http.watcher import Watcher
from api.socket_writer import SocketWriter
from batch_files.runner import Runner
from batching import BatchingManager, Inference, Model
from config import Config
from observe.feed import Feed
from observe.meters import Meters
from observe.queued_log import QueuedLog
from observe.served import ServedLog
from serving.adapters import AdapterStore, Weights
from serving.programs import Programs
from serving.text_watch import TextWatch
from stats import ServerStats

if TYPE_CHECKING:  # the first imports the policies, which a handler must not load
    from observe.replay.what_if import WhatIf


class Grammars(Protocol):
    """Compiles the forms of answers, in any thread; `counts` is of compiled, cached and refused ones."""

    @property
    def counts(self) -> Mapping[str, int]: ...
    def __len__(self) -> int: ...
    def compile(self, kind: Any, source: Any, parts: Mapping[str, Any], loose: Any) -> Any: ...


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    vocab_size: int
    longest_token: int
    bos_ids: tuple[int, ...]  # begin a prompt
    eos_ids: tuple[int, ...]  # end an answer
    special_ids: frozenset[int]  # control tokens
    chat_template: Any  # None for a model without one
    tool_format: Any  # how the model writes tool calls (`models/text/tool_format.py`)

    @property
    def oldest_call(self) -> object | None: ...
    def encode(self, text: str, end_of_text: Any = "text") -> list[int]: ...
    def encode_chat(
        self, messages: Any, add_generation_prompt: bool = True, *, continues: bool = False, variables: Any = None
    ) -> tuple[str, list[int]]: ...
    def decode(self, tokens: list[int], *, begins: bool = False) -> str: ...
    def decode_bytes(self, tokens: list[int]) -> bytes: ...
    def token_bytes(self, token: int) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What an engine has of its model, with weights or without.

    The first of its `n_pages` KV pages is for padding.
    """

    model: Model  # computes the steps
    tokenizer: Tokenizer
    model_name: str
    device: str
    dtype: str
    quantize: str = "none"  # format of the weights of linear layers
    kv_dtype: str
    context: int
    vocabulary: int  # token ids of the model, which may have more than the tokenizer
    width: int  # of the hidden state, and so of an embedding
    n_pages: int
    page_size: int
    window: int = 0  # tokens that a layer reads at most, 0 for all
    tokens_per_step: int  # the default of --max-tokens-per-step
    sampling: Mapping[str, float] = field(default_factory=dict)  # of OpenAI's dialect, where a request names none
    facts: dict[str, Any] = field(default_factory=dict)
    read_adapter: Callable[[str], Weights] | None = None  # where adapters can be served

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self.tokenizer.chat_template is not None

    @property
    def served_name(self) -> str:
        """The name that requests use for the model."""
        return self.model_name.removesuffix(" (random weights)")


@dataclass(frozen=True, kw_only=True)
class LoadedEngine(Parts):
    """A loaded model and its batching loop."""

    manager: BatchingManager
    make_inference: Callable[..., Inference]
    other_names: tuple[str, ...] = ()  # by which requests may ask for the model, too; * is any
    special_end: bool = True  # <|endoftext|> in a prompt is the special token, except on /inference
    stall_seconds: float | None = None  # None: the default of the device
    loaded_at: float = field(default_factory=time.time)
    what_if: WhatIf | None = None
    adapters: AdapterStore | None = None  # None for a server without any
    grammars: Grammars

    @property
    def names(self) -> list[str]:
        """The model's own name and its other ones, as lists of models have them."""
        return [self.served_name, *(name for name in self.other_names if name not in ("*", self.served_name))]

    @property
    def sequences_that_fit(self) -> dict[int, int]:
        """How many sequences of the context, its half, quarter and eighth the KV pages hold, by length in tokens."""
        pages = self.manager.pages
        if pages is None:
            return {}
        lengths = sorted({max(1, self.context >> shift) for shift in range(4)})
        return {length: pages.total // pages.pages_for(length) for length in lengths}


STALL_SECONDS = 300.0
GPU_STALL_SECONDS = 60.0
UNWATCHED_SECONDS = 60.0  # without a viewer, after which an endless load ends
STEP_SECONDS = 0.2  # to wait for the last step when the server stops


class Service:
    """The state of the server: `engine` is None while it loads; `failure` is the reason when loading failed."""

    def __init__(self, config: Config, policies: Any) -> None:
        self.config = config
        self.hosts, self.origins = config.hosts, config.origins
        self.engine: LoadedEngine | None = None  # set by the composition root, which connects its loop to this object
        self.failure: str | None = None
        self.policies = policies  # the package `policies`, which this one must not import
        self.draining = False
        self.serves = False  # True under gunicorn, if it writes an access log
        self.outage: Callable[[], tuple[str, str | None]] = lambda: ("ok", None)  # of the servers behind a queue
        self.deaths: Callable[[], int] = lambda: 0  # engines that failed for good, in all worker processes
        self.feed = Feed(show_text=config.dashboard_show_text)
        self.access_log = QueuedLog(sys.stdout)
        self.probed: dict[str, int] = {}  # the last status of each probe, such as /ready
        self.operations: list[Operation] = []
        self.watcher = Watcher()
        self.programs = Programs()
        self.registry = RequestRegistry(self.watcher, self.programs)
        self.meters = Meters()
        self.stats = ServerStats(self.meters)
        self.completer = Completer()
        self.socket_writer = SocketWriter()
        self.served: ServedLog | None = None  # set with the engine
        self.load: Any = None  # the `Load` of `api/pages/demo.py`, a layer above this one
        self.texts: TextWatch | None = None  # set when the engine has started
        self.batches: Runner | None = None  # None without a folder for them
        self._watched_at = time.monotonic()

    @cached_property
    def generating(self) -> frozenset[str]:
        """The routes that generate text, such as "POST /inference"."""
        return frozenset(f"{op.method.upper()} {op.path}" for op in self.operations if op.generates)

    def status(self) -> tuple[str, str | None]:
        """Return ok, loading, stalled or dead, and the reason."""
        if self.failure is not None:
            return "dead", self.failure
        if self.engine is None:
            return "loading", "the model is loading"
        inbox = self.engine.manager.inbox
        if inbox.is_closed:
            return "dead", inbox.failure or "the batching loop has ended"
        age = time.perf_counter() - inbox.heartbeat
        if age > self.stall_seconds:
            return "stalled", f"the batching loop has not completed a step for {age:.0f} s"
        if self.texts is not None and self.texts.stall is not None:
            return "stalled", self.texts.stall
        return "ok", None

    def health(self) -> tuple[str, str | None]:
        """Return the status, and for a queue `down` if none of its upstreams can be reached; its own routes work then."""
        status, reason = self.status()
        return (status, reason) if status != "ok" else self.outage()

    def readiness(self) -> tuple[str, str | None]:
        """Return ok when the server accepts new requests, otherwise its state and the reason."""
        if self.draining:
            return "draining", "the server is shutting down"
        status, reason = self.health()
        if status == "ok" and self.engine is not None and self.engine.manager.recovery.is_suspect:
            return "recovering", "a step failed; probing the engine"
        return status, reason

    @property
    def stall_seconds(self) -> float:
        """The seconds without an iteration after which the loop counts as stalled: no step takes that long."""
        if self.engine is not None and self.engine.stall_seconds is not None:
            return self.engine.stall_seconds
        on_gpu = self.engine is not None and self.engine.device.startswith("cuda")
        return GPU_STALL_SECONDS if on_gpu else STALL_SECONDS

    def heartbeat_age(self) -> float | None:
        """Return the seconds since the loop's last iteration, or None before there is a loop."""
        return None if self.engine is None else time.perf_counter() - self.engine.manager.heartbeat

    def wants_load(self) -> bool:
        """Return whether an endless load should continue: while the page has viewers, and always in a demo."""
        if self.feed.viewers or self.config.demo:
            self._watched_at = time.monotonic()
        return not self.draining and time.monotonic() - self._watched_at < UNWATCHED_SECONDS

    def stop(self) -> None:
        """End all open requests, because the process exits."""
        self.feed.close()
        if self.batches is not None:
            self.batches.stop(STEP_SECONDS)
        if self.engine is not None:
            self.engine.manager.stop(patience=STEP_SECONDS)
            if self.engine.what_if is not None:
                self.engine.what_if.stop()
