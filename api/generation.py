"""Code shared by all dialects: from a request with its prompts to inferences in the queue, and from these to an answer.

This module must not know the wire format of requests or answers.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flask import Response, g

from api.answer_parts import AnswerParts
from api.http import errors
from api.http.deferral import Deferred
from api.http.errors import ApiError
from api.http.registry import RequestContext
from api.prompts import Prompt, resolve_max_tokens
from api.schemas import body
from api.schemas.forms import Form
from api.schemas.scheduling_hints import HINTS, SchedulingHints
from api.service import LoadedEngine, Service
from batching import Inference, InferenceError
from serving.adapters import AdapterError, Loaded
from serving.inference import CHECK_SECONDS, timeout_error
from serving.wakeup import Wakeup

GREEDY_BELOW = 1e-5  # a temperature below this is 0
HIGHEST_TEMPERATURE = 1e6  # above it all tokens are practically equally likely
SEED_BITS = 63
MOST_TOKENS, MOST_SCORED, MOST_VECTORS = 1 << 15, 2048, 8  # of an answer that the completer writes
SCORES = ("logprobs", "prompt_logprobs")
PLACEHOLDERS = frozenset({"tgi", "dummy"})  # of Hugging Face's clients, as a model's name where a URL names the model


@dataclass(frozen=True)
class GenerationRequest:
    """A request in terms common to all dialects; `options` are those of `make_inference`.

    `max_tokens` is None for all tokens that the context leaves. `limit_name` and `prompt_name` are the names of the limit
    and of the prompts in the dialect, for error messages. There are `n` answers to each prompt.
    `parts` makes what takes an answer apart, None for one that is content alone. `ignored` names parts without effect.
    """

    prompts: list[Prompt]
    max_tokens: int | None
    limit_name: str
    prompt_name: str
    options: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    seed: int | None = None
    timeout_s: float | None = None
    parts: Callable[[], AnswerParts] | None = None
    ignored: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Generation:
    """A request whose inferences are in the queue: `n` for each prompt, in order."""

    request: GenerationRequest
    inferences: list[Inference]
    wakeup: Wakeup | None  # of a stream
    limit: float  # seconds that the server allows
    own_limit: float | None  # after which it ends with a partial answer, if that is before the server's limit
    ends_at: float  # the time at which it is late
    seed: int  # of its last prompt, which in most dialects is the only one
    part_ended: Wakeup  # `wakeup`, or that of a request that does not stream

    @property
    def groups(self) -> list[list[Inference]]:
        """The inferences of each prompt."""
        size = self.request.n
        return [self.inferences[i : i + size] for i in range(0, len(self.inferences), size)]

    @property
    def is_large(self) -> bool:
        """Whether its answer may have thousands of scored tokens or of numbers, or far more tokens; it takes long to write."""
        options, sequences = self.request.options, [inference.sequence for inference in self.inferences]
        if options.get("embeds"):
            return len(sequences) > MOST_VECTORS
        most = MOST_TOKENS if options.keys().isdisjoint(SCORES) else MOST_SCORED
        return sum(seq.max_tokens + len(seq.prompt_ids) for seq in sequences) > most

    @property
    def error(self) -> InferenceError | None:
        """The error of its first failed inference."""
        return next((inference.error for inference in self.inferences if inference.error is not None), None)

    @property
    def is_over(self) -> bool:
        """Whether all inferences have ended, or one has failed."""
        return all(i.is_finished for i in self.inferences) or self.error is not None

    def end_if_late(self, now: float) -> bool:
        """End it if its time is over: with what it has by its own limit, with an error by the server's."""
        if now < self.ends_at:
            return False
        if self.own_limit is not None:
            for inference in self.inferences:
                inference.end_early()
        else:
            self.cancel(timeout_error(self.limit))
        return True

    def end_if_lost(self) -> None:
        """End inferences that the loop has lost."""
        for inference in self.inferences:
            inference.end_if_lost()

    def cancel(self, error: InferenceError | None = None) -> None:
        """Cancel the inferences that have not ended."""
        for inference in self.inferences:
            if not inference.is_finished:
                inference.cancel(error)

    def wait_until_received(self, wakeup: Wakeup) -> None:
        """Wait until the loop has taken in a stream; raise ApiError if it refuses it.

        The headers of a stream are sent before its first token, and may say when that is expected.
        """
        while not all(i.is_received for i in self.inferences) and not self.is_over:
            wakeup.wait(CHECK_SECONDS)
            self.end_if_lost()
        if self.error is not None:
            self.cancel(self.error)
            raise errors.from_inference(self.error)

    def wait(self) -> None:
        """Wait until all inferences have succeeded. If one fails, cancel the others and raise ApiError."""
        for inference in self.inferences:
            # The clocks of the two waits differ: one may be over a moment before the other says that it is late.
            while not (inference.is_finished or self.error) and not inference.wait(self.ends_at - time.perf_counter()):
                self.end_if_late(time.perf_counter())
        if (error := self.error) is not None:
            # Not raised itself: it refers to the inferences, and a traceback would keep these frames until the GC.
            self.cancel(error)
            raise errors.from_inference(error)


def ready_engine(service: Service) -> LoadedEngine:
    """Return the engine, or raise 503 with the reason."""
    status, reason = service.status()
    if service.engine is None or status != "ok":
        raise ApiError(f"the server is {status}: {reason}. Try again", type="unavailable_error")
    return service.engine


def check_model(engine: LoadedEngine, model: str | None) -> Loaded | None:
    """Return the adapter that a request names as its model, None for the model itself; raise 404 if there is neither."""
    if model is None or model in engine.names or model in PLACEHOLDERS:
        return None
    if engine.adapters is None or engine.adapters.find(model) is None:
        if "*" in engine.other_names:
            return None
        others = [entry.name for entry in engine.adapters.entries()[:20]] if engine.adapters is not None else []
        names = ", ".join(repr(name) for name in [*engine.names, *others])
        raise ApiError(
            f"model {errors.shown(model)} is not served here. Use {names}, leave model out, or start the server "
            "with --served-names",
            type="not_found_error", param="model", code="model_not_found",
        )  # fmt: skip
    return adapter_of(engine, model, "model")


def adapter_of(engine: LoadedEngine, name: str, param: str) -> Loaded:
    """Return the adapter of this name for a request; raise ApiError if it cannot be had."""
    try:
        if engine.adapters is None:
            raise AdapterError(
                "unknown",
                f"unknown {name!r}, since this server has no adapters. Leave it out, or start it with --adapter",
            )
        return engine.adapters.acquire(name)
    except AdapterError as error:
        raise adapter_refusal(error, param) from None


def adapter_refusal(error: AdapterError, param: str) -> ApiError:
    """Return the answer for an adapter that cannot be used."""
    types = {"unknown": "not_found_error", "full": "overloaded"}
    return ApiError(f"{param}: {error}"[:2000], type=types.get(error.problem, "invalid_request_error"), param=param)


def constraint(engine: LoadedEngine, param: str, form: Form) -> Any:
    """Return a form as the option `grammar` of `make_inference`; raise ApiError for one that cannot be enforced.

    It is compiled here, in the handler's thread, so that no step waits for it; nor for the text of a mock model.
    """
    try:
        grammar = engine.grammars.compile(*form)
        if engine.device == "none":
            _ = grammar.short_text  # which it keeps
    except ValueError as error:
        raise ApiError(f"{param} cannot be enforced: {error}. Change it, or leave it out", param=param) from None
    return grammar


def ignored_hints(engine: LoadedEngine, hints: SchedulingHints, path: str = "") -> list[str]:
    """Return the scheduling fields of a request that neither the active policy nor the eviction uses."""
    if HINTS.keys().isdisjoint(hints.model_fields_set):
        return []
    policy, pages = engine.manager.policy, engine.manager.pages
    uses = (*(policy.claims.uses if policy is not None else ()), pages.evict.uses if pages is not None else "")
    return [path + name for name, hint in HINTS.items() if name in hints.model_fields_set and hint not in uses]


def start_generation(
    service: Service, engine: LoadedEngine, request: GenerationRequest, *, streams: bool = False
) -> Generation:
    """Put a request's inferences into the queue, all or none: half of an answer would be worth nothing."""
    lengths = [
        resolve_max_tokens(engine, prompt, request.max_tokens, request.limit_name, request.prompt_name)
        for prompt in request.prompts
    ]
    part_ended = Wakeup()
    wakeup = part_ended if streams else None
    options = {**request.options, "wakeup": wakeup, "on_end": None if streams else part_ended.notify}
    named = options.pop("program"), options["session"], options.pop("parent")
    if any(named):
        options["call"] = service.programs.begin(*named)
    temperature = options.get("temperature", 1.0)
    options["temperature"] = 0.0 if temperature < GREEDY_BELOW else min(temperature, HIGHEST_TEMPERATURE)
    inferences: list[Inference] = []
    context: RequestContext = g.context
    limit, own = math.inf if context.is_background else service.config.request_timeout, request.timeout_s
    if own is not None and own >= limit:
        own = None
    context.ends_early = own is not None
    for prompt, length in zip(request.prompts, lengths):
        seed = secrets.randbits(SEED_BITS) if request.seed is None else request.seed
        for j in range(request.n):
            inferences.append(
                engine.make_inference(
                    prompt.text, length, prompt.ids, seed=seed_of(seed, j) if j else seed, open_ended=request.max_tokens is None,
                    **context.inference_options(len(inferences)), **options,
                )
            )  # fmt: skip
    engine.manager.enqueue_all(inferences)
    ends_at = inferences[0].sequence.arrived_at + (own or limit)
    generation = Generation(request, inferences, wakeup, limit, own, ends_at, seed, part_ended)
    if wakeup is not None and engine.manager.policy is not None and engine.manager.policy.estimates:
        generation.wait_until_received(wakeup)
    return generation


def reply(
    generation: Generation, ignored: list[str], whole: Callable[[], Response],
    stream: Callable[[], Response] | None = None,
) -> Response | Deferred:  # fmt: skip
    """Return the response, which names the ignored fields: that of `stream` now, that of `whole` at the end.

    This thread waits for the end of an answer that is too large for the thread that writes all others.
    """
    ignored = ignored + generation.request.ignored

    def response() -> Response:
        generation.wait()
        return body.name_ignored(whole(), ignored)

    if generation.wakeup is not None and stream is not None:
        return body.name_ignored(stream(), ignored)
    return response() if generation.is_large else Deferred(generation, response)


def seed_of(seed: int, j: int) -> int:
    """Return the seed of answer j behind the first, whose seed is the request's own: a hash of it and j."""
    return int.from_bytes(hashlib.sha256(f"{seed} {j}".encode()).digest()[:8], "little") >> 1


def timings(inference: Inference) -> dict[str, float | int | None]:
    """Return the phases of a finished request in seconds, and the batch sizes it ran in."""
    seq = inference.sequence
    scheduled = seq.scheduled_at if seq.scheduled_at is not None else time.perf_counter()
    first = seq.first_token_at if seq.first_token_at is not None else scheduled
    last = seq.finished_at if seq.finished_at is not None else max(first, time.perf_counter())
    return {
        "queue_s": scheduled - seq.arrived_at,
        "prefill_s": first - scheduled,
        "decode_s": last - first,
        "ttft_s": first - seq.arrived_at,
        "total_s": last - seq.arrived_at,
        "iterations": seq.iterations,
        "batch_mean": seq.batch_sum / seq.iterations if seq.iterations else 0,
        "batch_max": seq.batch_max,
        "drafted": seq.drafted,
        "accepted": seq.accepted,
    }
