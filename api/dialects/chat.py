"""POST /v1/chat/completions: a conversation by the model's chat template, or as plain text where it has none.

The template never comes from a request. Plain text, as for GPT-2, has a line `System: ...`, `User: ...` or
`Assistant: ...` for each message, then `Assistant:`; the answer ends before a line that begins with `User:`, and the
role `developer` counts as `system`.
"""

from __future__ import annotations

from typing import Any

from flask import Blueprint

from api.dialects.logprobs import chat_logprobs
from api.dialects.openai import USAGE, begin, form_of, min_tokens_error, options_of, token_limit
from api.dialects.openai_writer import Writer, is_large, scored_tokens
from api.generation import Generation, GenerationRequest, constraint, start_generation
from api.hooks import admission
from api.http.errors import ApiError, shown
from api.http.openapi import Operation
from api.prompts import Prompt, check_size, encode, tokenizing
from api.schemas import body
from api.schemas.openai import TEMPLATE_FIELDS, ChatRequest, Message
from api.schemas.unsupported import MESSAGE, PLAIN_MESSAGE
from api.service import Engine, Service
from api.streaming import Delta
from serving.adapters import Loaded
from serving.inference import Inference

EXAMPLE = '{"messages": [{"role": "user", "content": "Who are you?"}]}'
STOP = "\nUser:"
SPEAKERS = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}
OPERATIONS = [
    Operation(
        "post", "/v1/chat/completions", "answer a conversation, by the model's chat template or as plain text", "openai",
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

    @routes.post("/v1/chat/completions")
    def chat() -> Any:
        engine, params, adapter, ignored = begin(service, ChatRequest, EXAMPLE)
        admission.take_more(service, params.n - 1)
        generating = generation_request(engine, params, adapter)
        generation = start_generation(service, engine, generating, streams=params.stream)
        return ChatWriter(engine, generation, params).reply(ignored)

    return routes


def prompt_of(engine: Engine, messages: list[Message], *, answers: bool = True, keep: int | None = None) -> Prompt:
    """Return the prompt of a conversation, or its last `keep` tokens; with `answers` it ends where the answer begins."""
    unsupported = MESSAGE if engine.chats else PLAIN_MESSAGE
    for i, message in enumerate(messages):
        body.refuse_unsupported(unsupported, message.model_extra or {}, f"messages.{i}.", " by this model")
    if not engine.chats:
        text = plain(messages, answers)
        return Prompt(text, encode(engine, text, special=engine.special_end, keep=keep, param="messages"))
    if keep is None:
        check_size(engine, (message.content or "" for message in messages), "messages")
    with tokenizing(sum(len(message.content or "") for message in messages), "messages"):
        text, ids = engine.tokenizer.encode_chat([fields_of(message) for message in messages], answers)
    return Prompt(text, ids if keep is None else ids[-keep:])


def plain(messages: list[Message], answers: bool) -> str:
    """Return a conversation as text."""
    if any(message.role not in SPEAKERS for message in messages):
        raise ApiError(
            "messages has the role tool, but this model has no chat template. Send only system, developer, user and "
            "assistant", param="messages",
        )  # fmt: skip
    lines = [f"{SPEAKERS[message.role]}: {message.content or ''}" for message in messages]
    return "\n".join([*lines, "Assistant:"] if answers else lines)


def fields_of(message: Message) -> dict[str, Any]:
    """Return the fields of a message that a chat template may read.

    Content that is null stays null only beside tool calls, as many templates write these only there. Raise ApiError for
    calls that a template could not read.
    """
    extra = {
        name: value
        for name, value in (message.model_extra or {}).items()
        if name in TEMPLATE_FIELDS and value is not None and (value or name != "tool_calls")
    }
    calls = extra.get("tool_calls")
    if calls and not (isinstance(calls, list) and all(map(_is_call, calls))):
        raise ApiError(
            f"messages has the tool_calls {shown(calls)}, but must have a list of objects such as "
            '{"type": "function", "function": {"name": "f", "arguments": "{}"}}. Send such objects', param="messages",
        )  # fmt: skip
    return {"role": message.role, "content": message.content if calls else message.content or "", **extra}


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def generation_request(engine: Engine, params: ChatRequest, adapter: Loaded | None) -> GenerationRequest:
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
    options = options_of(engine, params, adapter)
    form = form_of(params)
    if form is not None:
        options["grammar"] = constraint(engine, *form)
    if not engine.chats:
        options["stop_texts"] = [*params.stop, STOP]
    if params.top_logprobs is not None and params.top_logprobs > 0 and not params.logprobs:
        raise ApiError(
            f"top_logprobs is {params.top_logprobs}, but needs logprobs. Send logprobs: true, or remove top_logprobs",
            param="top_logprobs",
        )
    if params.logprobs:
        options["logprobs"] = params.top_logprobs or 0
    prompt = prompt_of(engine, params.messages, keep=params.truncate_prompt_tokens)
    return GenerationRequest(
        [prompt], most, "max_tokens", "messages", options,
        n=params.n, best_of=params.n, seed=params.seed, timeout_s=params.timeout_s,
    )  # fmt: skip


class ChatWriter(Writer[ChatRequest]):
    """Writes the answer to a chat request, whole or in chunks."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def __init__(self, engine: Engine, generation: Generation, params: ChatRequest) -> None:
        scored = bool(params.logprobs)
        large = is_large(generation, scored=scored, with_prompts=params.return_token_ids)
        super().__init__(engine, generation, params, scored=scored, large=large)

    def _content(self, text: str, inference: Inference, is_first: bool) -> str:
        role = '"role":"assistant",' if is_first else ""
        return f'"{"delta" if self.params.stream else "message"}":{{{role}"content":{self._dumps(text)}}}'

    def _scores(self, delta: Delta, inference: Inference) -> dict[str, Any]:
        return chat_logprobs(self.engine.tokenizer, scored_tokens(delta, inference), self.params.top_logprobs or 0)
