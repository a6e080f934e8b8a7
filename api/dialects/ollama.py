"""Ollama's dialect: chats and completions as newline-delimited JSON, and what its clients ask about models.

A chat becomes a `ChatRequest`, and so does a prompt unless it is `raw` or the model has no chat template.
"""

from __future__ import annotations

import hashlib
import time
from datetime import datetime, timezone
from json import loads
from typing import Any, Literal

from flask import Response, current_app, g, jsonify, request

from api import streaming
from api.dialects import chat, tools
from api.dialects.embeddings import start_embedding, vector
from api.dialects.openai import ServerVersion, completion_request
from api.generation import (
    Generation,
    GenerationRequest,
    check_model,
    ignored_hints,
    ready_engine,
    reply,
    start_generation,
    timings,
)
from api.http import errors
from api.http.errors import ApiError, shown
from api.http.openapi import JSON, NotRequired, Object, Routes, TypedDict
from api.schemas import body
from api.schemas.ollama import OllamaChatRequest, OllamaEmbedRequest, OllamaGenerateRequest, OllamaRequest, ShowRequest
from api.schemas.openai import ChatRequest, CompletionRequest, Message
from api.schemas.scheduling_hints import SchedulingHints
from api.service import LoadedEngine, Service
from api.streaming import Delta
from serving.adapters import Loaded

EXAMPLE = '{"model": "smollm2", "messages": [{"role": "user", "content": "Who are you?"}]}'
NDJSON = "application/x-ndjson"
LATEST = ":latest"  # the tag of a name without one
# Of the release whose API this is, not the server's own: clients refuse an Ollama that is too old for them.
VERSION = "0.13.5"
IN_MESSAGE = {"thinking": "reasoning_content", "tool_name": "name"}
OllamaAnswer = TypedDict("OllamaAnswer", {
    "model": str, "created_at": str, "message": NotRequired[Object], "response": NotRequired[str],
    "done": Literal[True], "done_reason": str,
})  # fmt: skip
OllamaModel = TypedDict("OllamaModel", {
    "name": str, "model": str, "modified_at": str, "digest": str, "details": Object, "model_info": Object,
    "capabilities": list[str],
})  # fmt: skip
OllamaEmbeddings = TypedDict("OllamaEmbeddings", {"model": str, "embeddings": list[list[float]]})
OllamaModels = TypedDict("OllamaModels", {"models": list[OllamaModel]})
ANSWER = {JSON: OllamaAnswer, NDJSON: None}
SENT = {"messages": [{"role": "user", "content": "Who are you?"}], "stream": False, "options": {"num_predict": 8}}


def routes_of(service: Service) -> Routes:
    """Return the routes of this dialect."""
    routes = Routes("ollama", "ollama", prefix="/api")

    @routes.post(
        "/chat", "answer a conversation (Ollama's API)", body=OllamaChatRequest, example=SENT, answer=ANSWER,
        generates=True,
    )  # fmt: skip
    def chats() -> Any:
        return _answer(service, OllamaChatRequest)

    @routes.post(
        "/generate", "answer a prompt (Ollama's API)", body=OllamaGenerateRequest,
        example={"prompt": "ROMEO:", "stream": False, "options": {"num_predict": 8}}, answer=ANSWER, generates=True,
    )  # fmt: skip
    def generate() -> Any:
        return _answer(service, OllamaGenerateRequest)

    @routes.post(
        "/show", "what is known about a model (Ollama's API)", body=ShowRequest, example={}, answer=OllamaModel,
        errors=(404, 503),
    )  # fmt: skip
    def show() -> Response:
        engine = ready_engine(service)
        params, ignored = body.validate(ShowRequest, body.take(request, EXAMPLE, any_type=True))
        adapter = _adapter(engine, params.model or params.name)
        name = engine.served_name if adapter is None else adapter.name
        return body.name_ignored(jsonify(_known(engine, name, engine.loaded_at)), ignored)

    @routes.post(
        "/embed", "embed one or several prompts (Ollama's API)", body=OllamaEmbedRequest, example={"input": "ROMEO:"},
        answer=OllamaEmbeddings, generates=True,
    )  # fmt: skip
    def embed() -> Any:
        engine = ready_engine(service)
        params, ignored = body.validate(OllamaEmbedRequest, body.take(request, EXAMPLE, any_type=True))
        generation = start_embedding(service, engine, params, _adapter(engine, params.model))
        began = g.began

        def write() -> Response:
            return jsonify(
                model=params.model or engine.served_name,
                embeddings=[vector(inference).tolist() for inference in generation.inferences],
                total_duration=_nanoseconds(time.perf_counter() - began),
                load_duration=_nanoseconds(timings(generation.inferences[0])["queue_s"]),
                prompt_eval_count=sum(len(inference.sequence.prompt_ids) for inference in generation.inferences),
            )

        return reply(generation, ignored + ignored_hints(engine, params), write)

    @routes.get("/tags", "the served model and its adapters (Ollama's API)", answer=OllamaModels, errors=(503,))
    @routes.get("/ps", "the models in memory (Ollama's API)", answer=OllamaModels, errors=(503,))
    def tags() -> Response:
        engine = ready_engine(service)
        entries = engine.adapters.entries() if engine.adapters is not None else []
        adapters = [_known(engine, entry.name, entry.added_at) for entry in entries]
        return jsonify(models=[*(_known(engine, name, engine.loaded_at) for name in engine.names), *adapters])

    @routes.get("/version", "the version of Ollama whose API this is (Ollama's API)", answer=ServerVersion)
    def version() -> Response:
        return jsonify(version=VERSION)

    return routes


def _adapter(engine: LoadedEngine, model: str | None) -> Loaded | None:
    """Return the adapter that a request names as its model, with or without a tag; see `check_model`."""
    return check_model(engine, model if model in (None, *engine.names) else str(model).removesuffix(LATEST))


def _answer(service: Service, schema: type[OllamaRequest]) -> Any:
    engine = ready_engine(service)
    params, ignored = body.validate(schema, body.take(request, EXAMPLE, any_type=True))
    adapter = _adapter(engine, params.model)
    writer = OllamaWriter(engine, params)
    if not getattr(params, params.prompted_by):
        return body.name_ignored(jsonify(writer.line({}, {"done": True, "done_reason": "load"})), ignored)
    with errors.renaming({"messages": params.prompted_by, "max_tokens": "num_predict", "response_format": "format"}):
        generating = generation_request(engine, params, adapter, ignored)
        generation = start_generation(service, engine, generating, streams=params.stream)
    return writer.reply(generation, ignored + ignored_hints(engine, params))


def generation_request(
    engine: LoadedEngine, params: OllamaRequest, adapter: Loaded | None, ignored: list[str]
) -> GenerationRequest:
    """Return a request in common terms, and add to the names of the fields that have no effect."""
    shared = {*SchedulingHints.model_fields, "format"}
    options = params.options.model_dump(by_alias=True)  # Ollama's defaults, unless the model's authors name others
    fields = {
        **{name: value for name, value in options.items() if name not in engine.sampling},
        **params.options.model_dump(exclude_unset=True, by_alias=True),
        **params.model_dump(include=shared, exclude_none=True, by_alias=True),
    }  # fmt: skip
    if isinstance(params, OllamaChatRequest):
        fields |= {"messages": _in_chat(params.messages), "tools": params.tools}
    elif isinstance(params, OllamaGenerateRequest):
        if params.raw and params.system:
            raise ApiError("raw is true, but a raw prompt has no system message. Leave system out", param="system")
        if params.raw or not (engine.chats or params.system):
            ignored += [] if params.think is None else ["think"]
            completion, _ = body.validate(CompletionRequest, {**fields, "prompt": params.prompt})
            return completion_request(engine, completion, adapter)
        turns = [("system", params.system), ("user", params.prompt)]
        fields["messages"] = [{"role": role, "content": text} for role, text in turns if text]
    written, think = engine.tokenizer.tool_format, params.think
    if think and not written.thinks:
        raise ApiError(f"think is {shown(think)}, but {engine.served_name} does not think. Leave it out", param="think")
    if think is not None and written.thinks:
        fields["chat_template_kwargs"] = {"enable_thinking": bool(think)}
        fields["reasoning_effort"] = think if isinstance(think, str) else None
    chat_params, _ = body.validate(ChatRequest, fields)
    unread = chat_params.ignored(written.variables if engine.chats else None)
    ignored += dict.fromkeys(name if name.startswith("messages.") else "think" for name in unread)
    return chat.generation_request(engine, chat_params, adapter)


def _in_chat(messages: list[Message]) -> list[Message]:
    """Give the fields of messages their names in chat, and calls without ids some, in whose order results follow."""
    waiting: list[str] = []
    for i, message in enumerate(messages):
        extra = message.model_extra or {}
        body.refuse_unsupported({"images": ([],)}, extra, f"messages.{i}.", " by this model")
        for name, known in IN_MESSAGE.items():
            if name in extra:
                extra[known] = extra.pop(name)
        calls = extra.get("tool_calls")
        for number, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, dict):
                waiting.append(call.setdefault("id", f"call{i:03}{number:02}"))
        if message.role == "tool" and waiting and extra.setdefault("tool_call_id", waiting[0]) in waiting:
            waiting.remove(extra["tool_call_id"])
    return messages


class OllamaWriter:
    """Writes the answer to one request, whole or as lines."""

    def __init__(self, engine: LoadedEngine, params: OllamaRequest) -> None:
        self._engine = engine
        self._model = params.model or engine.served_name
        self._is_chat = isinstance(params, OllamaChatRequest)
        self._names = {"content": "content" if self._is_chat else "response", "reasoning": "thinking"}
        self._dumps = current_app.json.dumps  # in ASCII: some clients end a line at any of Unicode's line separators
        self._began = g.began
        self._calls: list[dict[str, str]] = []
        self._sent = 0  # calls

    def reply(self, generation: Generation, ignored: list[str]) -> Any:
        """Return the answer, whole or as a stream; it names the ignored fields."""
        self._taker = tools.parts_of(self._engine, generation)
        self._generation = generation
        return reply(generation, ignored, self._whole, self._stream)

    def line(self, new: dict[str, Any], ending: dict[str, Any]) -> dict[str, Any]:
        """Return an object of the answer, with what is new in it."""
        part = {self._names["content"]: "", **new}
        now = datetime.now(timezone.utc).isoformat()
        part = {"message": {"role": "assistant", **part}} if self._is_chat else part
        return {"model": self._model, "created_at": now, **part, **ending}

    def _whole(self) -> Response:
        return jsonify(self.line(self._new(self._generation.inferences[0].answer, True), self._ending()))

    def _stream(self) -> Response:
        return streaming.respond(
            self._generation, self._lines, lambda: self._written(self.line({}, self._ending())), event=self._written,
            ping=b" ", media=NDJSON,
        )  # fmt: skip

    def _written(self, value: Any) -> bytes:
        return self._dumps(value).encode() + b"\n"

    def _lines(self, delta: Delta) -> bytes:
        new = self._new(delta.text, delta.ended)
        return self._written(self.line(new, {"done": False})) if new else b""

    def _new(self, text: str, ended: bool) -> dict[str, Any]:
        """Return the new parts of the answer. A call comes when it is whole; one that was cut off never does."""
        new: dict[str, Any] = {}
        for piece in self._taker.feed(text, ended):
            if piece.kind == "call":
                self._calls.append({"id": piece.id, "name": piece.text, "arguments": ""})
            elif piece.kind == "arguments":
                self._calls[-1]["arguments"] += piece.text
            else:
                new[self._names[piece.kind]] = new.get(self._names[piece.kind], "") + piece.text
        start, self._sent = self._sent, len(self._calls) - self._taker.in_call
        if calls := self._calls[start : self._sent]:
            new["tool_calls"] = [
                {"id": c["id"], "function": {"index": i, "name": c["name"], "arguments": loads(c["arguments"])}}
                for i, c in enumerate(calls, start)
            ]
        return new

    def _ending(self) -> dict[str, Any]:
        """Return why the answer ended, its tokens, and times in nanoseconds; the model loads while a request queues."""
        inference = self._generation.inferences[0]
        times = timings(inference)
        seconds = {
            "total_duration": time.perf_counter() - self._began, "load_duration": times["queue_s"],
            "prompt_eval_duration": times["prefill_s"], "eval_duration": times["decode_s"],
        }  # fmt: skip
        return {
            "done": True, "done_reason": "stop" if inference.finish_reason == "stop" else "length",
            "prompt_eval_count": len(inference.sequence.prompt_ids), "eval_count": len(inference.output_ids),
            **{name: _nanoseconds(value) for name, value in seconds.items()},
        }  # fmt: skip


def _nanoseconds(seconds: float | None) -> int:
    return int(1e9 * (seconds or 0))


def _known(engine: LoadedEngine, name: str, since: float) -> dict[str, Any]:
    """Return what is known of the model, or of an adapter by its name."""
    family, parameters = engine.facts.get("family", "unknown"), engine.facts.get("parameters")
    formats = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "none": ""}
    level = formats.get(engine.dtype, engine.dtype) if engine.quantize == "none" else engine.quantize.upper()
    size = "" if parameters is None else f"{parameters / 1e6:.1f}M" if parameters < 1e9 else f"{parameters / 1e9:.1f}B"
    tagged = name if ":" in name else name + LATEST
    return {
        "name": tagged, "model": tagged, "modified_at": datetime.fromtimestamp(since, timezone.utc).isoformat(),
        "digest": hashlib.sha256(f"{name} {engine.facts.get('revision')} {level}".encode()).hexdigest(),
        "context_length": engine.context,
        "parameters": "\n".join(f"{name} {value}" for name, value in engine.sampling.items()),
        "model_info": {
            "general.architecture": family, "general.parameter_count": parameters,
            f"{family}.context_length": engine.context,
        },
        "details": {
            "parent_model": "" if name in engine.names else engine.served_name,
            "family": family, "families": [family], "parameter_size": size, "quantization_level": level,
        },
        "capabilities": ["completion", "tools", "embedding", *["thinking"] * engine.tokenizer.tool_format.thinks],
    }  # fmt: skip
