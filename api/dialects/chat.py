"""POST /v1/chat/completions: a conversation as plain text, because GPT-2 has no chat format.

The template is fixed and never comes from a request: a line `System: ...`, `User: ...` or `Assistant: ...` for each
message, then `Assistant:`. The answer ends before a line that begins with `User:`. The role `developer` counts as
`system`.
"""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, jsonify

from api.dialects.openai import USAGE, Kind, answer, min_tokens_error, options_of, token_limit
from api.dialects.openai_writer import Writer, choose, usage
from api.generation import GenerationRequest, Prompt, encode
from api.http.errors import ApiError
from api.http.openapi import Operation
from api.schemas.openai import ChatRequest, Message
from api.service import Engine, Service
from api.streaming import Delta
from observe.feed import data
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
    """Return the route."""
    routes = Blueprint("chat", __name__)
    kind = Kind(ChatRequest, EXAMPLE, lambda params: params.n, generation_request, ChatWriter)

    @routes.post("/v1/chat/completions")
    def chat() -> Any:
        return answer(service, kind)

    return routes


def plain(messages: list[Message]) -> str:
    """Return a conversation as text."""
    lines = [f"{SPEAKERS[message.role]}: {message.content}" for message in messages]
    return "\n".join([*lines, "Assistant:"])


def generation_request(engine: Engine, params: ChatRequest) -> GenerationRequest:
    """Return the request in common terms."""
    limits = [n for n in (params.max_completion_tokens, params.max_tokens) if n is not None]
    if len(set(limits)) > 1:
        raise ApiError(
            f"max_tokens is {str(params.max_tokens)[:40]} and max_completion_tokens is "
            f"{str(params.max_completion_tokens)[:40]}, but both set the same limit. Send only one of them", param="max_tokens",
        )  # fmt: skip
    most = token_limit(limits[0]) if limits else None
    if most is not None and params.min_tokens > most:
        raise min_tokens_error(params.min_tokens, most)
    options = options_of(engine, params)
    options["stops"] = [*params.stop, STOP]
    text = plain(params.messages)
    ids = encode(engine, text, special=engine.special_end, keep=params.truncate_prompt_tokens, param="messages")
    return GenerationRequest(
        [Prompt(text, ids)], most, "max_tokens", options,
        n=params.n, best_of=params.n, seed=params.seed, timeout_s=params.timeout_s,
    )  # fmt: skip


class ChatWriter(Writer[ChatRequest]):
    """Writes the answer to a chat request, whole or in chunks."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def whole(self) -> Response:
        self.generation.wait()
        choices = [self._choice(i, inference) for i, inference in enumerate(choose(self.generation))]
        total = usage(self.generation, self.generation.inferences)
        return jsonify({**self.head, "system_fingerprint": None, "choices": choices, "usage": total})

    def _choice(self, index: int, inference: Inference) -> dict[str, Any]:
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": inference.answer},
            "logprobs": None,
            "finish_reason": inference.finish_reason,
            "stop_reason": inference.stop_reason,
        }
        if self.params.return_token_ids:
            choice["token_ids"] = inference.output_ids
        return choice

    def _chunk(self, delta: Delta) -> bytes:
        """Return the event of one choice. The first has role and text, so that it shows the time of the first token."""
        inference = self.generation.inferences[delta.choice]
        message: dict[str, Any] = {"content": delta.text}
        if self.is_first(delta.choice):
            message = {"role": "assistant"} | message
        choice = {
            "index": delta.choice,
            "delta": message,
            "logprobs": None,
            "finish_reason": inference.finish_reason if delta.ended else None,
            "stop_reason": inference.stop_reason if delta.ended else None,
        }
        if self.params.return_token_ids:
            choice["token_ids"] = inference.sequence.output_ids[delta.start : delta.stop]
        chunk: dict[str, Any] = {**self.head, "choices": [choice]}
        if self.usage_last:
            chunk["usage"] = self.usage_so_far(delta) if self.usage_always else None
        return data(chunk)
