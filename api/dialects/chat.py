"""POST /v1/chat/completions: a conversation as plain text, since GPT-2 has no format for one.

The template is fixed and never comes from a request: a line `System: ...`, `User: ...` or `Assistant: ...` for each
message, then `Assistant:`; the answer ends before a line that begins with `User:`. A developer speaks as the system.
"""

from __future__ import annotations

import time
from typing import Any

from flask import Blueprint, Response, g, jsonify

from api import generation, streaming
from api.dialects.openai import USAGE, Kind, answer, limit, options_of, too_many_at_least
from api.dialects.openai_writer import choose, stream_options, usage, usage_so_far
from api.generation import Generation, GenerationRequest, Prompt
from api.http.deferral import Deferred
from api.http.errors import ApiError
from api.http.openapi import Operation
from api.schemas import ChatRequest
from api.schemas.openai import UNSUPPORTED_CHAT, Message
from api.service import Engine, Service
from api.streaming import Delta, StreamReader
from observe.feed import dumps
from serving.inference import Inference

EXAMPLE = '{"messages": [{"role": "user", "content": "Who are you?"}]}'
STOP = "\nUser:"
SPEAKERS = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}
OPERATIONS = [
    Operation(
        "post", "/v1/chat/completions", "answer a conversation, with one fixed plain template", "openai",
        body=ChatRequest, generates=True, streams=True,
        example={"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 8},
        answer={
            "type": "object", "required": ["id", "object", "created", "model", "choices", "usage"],
            "properties": {"object": {"const": "chat.completion"}, "choices": {"type": "array"}, "usage": USAGE},
        },
    ),
]  # fmt: skip


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("chat", __name__)
    kind = Kind(ChatRequest, EXAMPLE, UNSUPPORTED_CHAT, lambda asked: asked.n, ask_of, ChatWriter)

    @routes.post("/v1/chat/completions")
    def chat() -> Response | Deferred:
        return answer(service, kind)

    return routes


def plain(messages: list[Message]) -> str:
    """Return a conversation as text."""
    lines = [f"{SPEAKERS[message.role]}: {message.content}" for message in messages]
    return "\n".join([*lines, "Assistant:"])


def ask_of(engine: Engine, asked: ChatRequest) -> GenerationRequest:
    given = [n for n in (asked.max_completion_tokens, asked.max_tokens) if n is not None]
    if len(set(given)) > 1:
        raise ApiError(
            f"max_tokens is {str(asked.max_tokens)[:40]} and max_completion_tokens is "
            f"{str(asked.max_completion_tokens)[:40]}, but both set the same limit. Send only one of them", param="max_tokens",
        )  # fmt: skip
    most = limit(given[0]) if given else None
    if most is not None and asked.min_tokens > most:
        raise too_many_at_least(asked.min_tokens, most)
    options = options_of(engine, asked)
    options["stops"] = [*asked.stop, STOP]
    text = plain(asked.messages)
    ids = generation.encode(
        engine, text, special=engine.special_end, keep=asked.truncate_prompt_tokens, param="messages"
    )
    return GenerationRequest(
        [Prompt(text, ids)], most, "max_tokens", options,
        n=asked.n, best_of=asked.n, seed=asked.seed, timeout_s=asked.timeout_s,
    )  # fmt: skip


class ChatWriter:
    """Writes the answer to one chat request, whole or in chunks."""

    is_large = False  # 16 texts, each within the context

    def __init__(self, engine: Engine, job: Generation, asked: ChatRequest) -> None:
        self.job = job
        self.asked = asked
        self.head = {
            "id": f"chatcmpl-{g.request_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": engine.served_name,
        }
        self._usage_last, self._usage_always = stream_options(asked)
        self._begun: set[int] = set()

    def whole(self) -> Response:
        self.job.wait()
        choices = [self._choice(i, inference) for i, inference in enumerate(choose(self.job))]
        total = usage(self.job, self.job.inferences)
        return jsonify({**self.head, "system_fingerprint": None, "choices": choices, "usage": total})

    def _choice(self, index: int, inference: Inference) -> dict[str, Any]:
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": inference.answer},
            "logprobs": None,
            "finish_reason": inference.finish_reason,
            "stop_reason": inference.stop_reason,
        }
        if self.asked.return_token_ids:
            choice["token_ids"] = inference.output_ids
        return choice

    def stream(self) -> Response:
        self.head["object"] = "chat.completion.chunk"
        followers = [
            StreamReader(i, inference, scored=self.asked.return_token_ids, every_token=False)
            for i, inference in enumerate(self.job.inferences)
        ]
        return streaming.respond(
            self.job, followers, self._chunk, self._end, tokens_together=self.asked.stream_interval
        )

    def _chunk(self, growth: Delta) -> bytes:
        """Return one choice's event; the first has the role and text too, so that it tells the first token's time."""
        inference = self.job.inferences[growth.index]
        delta: dict[str, Any] = {"content": growth.text}
        if growth.index not in self._begun:
            self._begun.add(growth.index)
            delta = {"role": "assistant"} | delta
        choice = {
            "index": growth.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": inference.finish_reason if growth.ended else None,
            "stop_reason": inference.stop_reason if growth.ended else None,
        }
        if self.asked.return_token_ids:
            choice["token_ids"] = inference.sequence.output_ids[growth.start : growth.stop]
        chunk: dict[str, Any] = {**self.head, "choices": [choice]}
        if self._usage_last:
            chunk["usage"] = usage_so_far(self.job, growth) if self._usage_always else None
        return f"data: {dumps(chunk)}\n\n".encode()

    def _end(self) -> bytes:
        if not self._usage_last:
            return streaming.DONE
        total = {**self.head, "choices": [], "usage": usage(self.job, self.job.inferences)}
        return streaming.event(total) + streaming.DONE
