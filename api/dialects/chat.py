"""POST /v1/chat/completions: a conversation by the model's chat template, or as plain text where it has none.

The template never comes from a request. Plain text, as for GPT-2, has a line `System: ...`, `User: ...` or
`Assistant: ...` for each message, then `Assistant:`; the answer ends before a line that begins with `User:`, and the
role `developer` counts as `system`. What a template or plain text cannot write of tools, they get as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from api.answer_parts import Piece
from api.dialects import tools
from api.dialects.logprobs import chat_logprobs
from api.dialects.openai import Usage, begin, min_tokens_error, options_of
from api.dialects.openai_writer import Writer, scored_tokens
from api.generation import Generation, GenerationRequest, start_generation
from api.hooks import admission
from api.http.errors import ApiError, shown
from api.http.openapi import NotRequired, Object, Routes, TypedDict
from api.prompts import Prompt, check_size, encode, tokenizing
from api.schemas import body
from api.schemas.openai import TEMPLATE_FIELDS, UNLIMITED, ChatRequest, Message
from api.schemas.unsupported import MESSAGE
from api.service import LoadedEngine, Service
from api.streaming import Delta
from serving.adapters import Loaded
from serving.inference import Inference

EXAMPLE = '{"messages": [{"role": "user", "content": "Who are you?"}]}'
STOP = "\nUser:"
NAMES = {"content": "content", "reasoning": "reasoning_content"}  # of the kinds of pieces, in a message
SPEAKERS = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}
ToolCall = TypedDict("ToolCall", {"id": str, "type": Literal["function"], "function": dict[str, str]})
ChatMessage = TypedDict("ChatMessage", {
    "role": Literal["assistant"], "content": str | None, "reasoning_content": NotRequired[str],
    "tool_calls": NotRequired[list[ToolCall]],
})  # fmt: skip
ChatChoice = TypedDict("ChatChoice", {
    "index": int, "message": ChatMessage, "logprobs": Object | None, "finish_reason": str,
    "stop_reason": str | int | None,
})  # fmt: skip
ChatCompletion = TypedDict("ChatCompletion", {
    "id": str, "object": Literal["chat.completion"], "created": int, "model": str, "choices": list[ChatChoice],
    "usage": Usage,
})  # fmt: skip


def routes_of(service: Service) -> Routes:
    """Return the route."""
    routes = Routes("chat", "openai")

    @routes.post(
        "/v1/chat/completions", "answer a conversation, by the model's chat template or as plain text",
        body=ChatRequest, example={"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 8},
        answer=ChatCompletion, generates=True, streams=True,
    )  # fmt: skip
    def chat() -> Any:
        engine, params, adapter, ignored = begin(service, ChatRequest, EXAMPLE)
        admission.take_more(service, params.n - 1)
        generating = generation_request(engine, params, adapter)
        generation = start_generation(service, engine, generating, streams=params.stream)
        return ChatWriter(engine, generation, params).reply(ignored)

    return routes


def prompt_of(
    engine: LoadedEngine,
    messages: list[Message],
    *,
    answers: bool = True,
    keep: int | None = None,
    continues: bool = False,
    described: Sequence[dict[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> Prompt:
    """Return the prompt of a conversation, or its last `keep` tokens.

    With `answers` it ends where the answer begins, and with `continues` where the last message ends. `described` are the
    tools, and `variables` what the template reads beside the messages.
    """
    for i, message in enumerate(messages):
        body.refuse_unsupported(MESSAGE, message.model_extra or {}, f"messages.{i}.", " by this model")
    history = engine.tokenizer.tool_format.history([fields_of(message) for message in messages], described)
    if not engine.chats:
        text = plain(history, answers)
        return Prompt(text, encode(engine, text, special=engine.special_end, keep=keep, param="messages"))
    contents = [message.content or "" for message in messages]
    schemas = [json.dumps(tool) for tool in described]
    if keep is None:
        param = "tools" if sum(map(len, schemas)) > sum(map(len, contents)) else "messages"
        check_size(engine, contents + schemas, param)
    with tokenizing(sum(map(len, contents + schemas)), "messages"):
        text, ids = engine.tokenizer.encode_chat(history, answers, continues=continues, variables=variables)
    return Prompt(text, ids if keep is None else ids[-keep:])


def plain(messages: Sequence[Mapping[str, Any]], answers: bool) -> str:
    """Return a conversation as text."""
    lines = [f"{SPEAKERS[message['role']]}: {message['content']}" for message in messages]
    return "\n".join([*lines, "Assistant:"] if answers else lines)


def check_continued(params: ChatRequest) -> None:
    """Raise ApiError unless the last message can be continued, if the request wants that."""
    if not params.continue_final_message:
        return
    if params.add_generation_prompt:
        raise ApiError(
            "continue_final_message and add_generation_prompt are both true, but an answer either goes on or begins. Send "
            "add_generation_prompt: false", param="continue_final_message",
        )  # fmt: skip
    last = params.messages[-1]
    if last.role != "assistant" or not last.content or (last.model_extra or {}).get("tool_calls"):
        raise ApiError(
            "continue_final_message is true, but the last message is no text of the assistant. Send one, or remove "
            "continue_final_message", param="continue_final_message",
        )  # fmt: skip


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
    kinds = {"name": str, "arguments": dict | str | None}
    return isinstance(function, dict) and all(isinstance(function.get(name), kind) for name, kind in kinds.items())


def _cut_calls(messages: list[Message]) -> Iterator[str]:
    """Yield the names of calls whose arguments are no JSON object, as where an answer was cut off."""
    for call in (call for message in messages for call in (message.model_extra or {}).get("tool_calls") or ()):
        arguments = call["function"].get("arguments") or "{}"
        with suppress(ValueError, RecursionError):
            if isinstance(arguments, dict) or isinstance(json.loads(arguments), dict):
                continue
        yield f"tool_calls.{call['function']['name']}"


def prompt_and_calls(engine: LoadedEngine, params: ChatRequest) -> tuple[Prompt, tools.Calls]:
    """Return the prompt of a request and the calls that its answer may have."""
    check_continued(params)
    calls = tools.calls_of(engine, params)
    described = tools.described(calls)
    prompt = prompt_of(
        engine, params.messages, answers=params.add_generation_prompt, keep=params.truncate_prompt_tokens,
        continues=params.continue_final_message, described=described,
        variables=tools.template_variables(engine, params, described),
    )  # fmt: skip
    return prompt, calls


def generation_request(engine: LoadedEngine, params: ChatRequest, adapter: Loaded | None) -> GenerationRequest:
    """Return the request in common terms."""
    limit = params.max_tokens if params.max_completion_tokens is None else params.max_completion_tokens
    most = None if limit == UNLIMITED else limit
    if most is not None and params.min_tokens > most:
        raise min_tokens_error(params.min_tokens, most)
    options = options_of(engine, params, adapter)
    if not engine.chats:
        options["stop_texts"] = [*params.stop, STOP]
    if params.top_logprobs is not None and params.top_logprobs > 0 and not params.logprobs:
        raise ApiError(
            f"top_logprobs is {params.top_logprobs}, but needs logprobs. Send logprobs: true, or remove top_logprobs",
            param="top_logprobs",
        )
    if params.logprobs:
        options["logprobs"] = params.top_logprobs or 0
    prompt, calls = prompt_and_calls(engine, params)
    parts = tools.shape(engine, params, calls, prompt, options)
    return GenerationRequest(
        [prompt], most, "max_tokens", "messages", options,
        n=params.n, seed=params.seed, timeout_s=params.timeout_s, parts=parts,
        ignored=[*_cut_calls(params.messages), *getattr(options.get("grammar"), "left_out", ())],
    )  # fmt: skip


class ChatWriter(Writer[ChatRequest]):
    """Writes the answer to a chat request, whole or in chunks."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def __init__(self, engine: LoadedEngine, generation: Generation, params: ChatRequest) -> None:
        super().__init__(engine, generation, params, scored=bool(params.logprobs))
        make = generation.request.parts
        self._takers = [make() for _ in generation.inferences] if make is not None else []

    def _content(self, text: str, inference: Inference, is_first: bool) -> str:
        role = '"role":"assistant",' if is_first else ""
        return f'"{"delta" if self.params.stream else "message"}":{{{role}"content":{self._dumps(text)}}}'

    def _reason(self, delta: Delta, inference: Inference) -> str | None:
        has_called = bool(self._takers) and self._takers[delta.choice].has_called
        return "tool_calls" if has_called and inference.finish_reason == "stop" else inference.finish_reason

    def _choice(self, delta: Delta, inference: Inference, content: str | None = None) -> str:
        if self._takers and content is None:
            pieces = self._takers[delta.choice].feed(delta.text, delta.ended)
            content = f'"message":{self._dumps(_message(pieces))}'
        return super()._choice(delta, inference, content)

    def _chunk(self, delta: Delta, content: str | None = None) -> bytes:
        """Return the events of one choice: one for each piece, as clients expect, the last with its tokens and its end."""
        if not self._takers:
            return super()._chunk(delta)
        deltas = [*map(_delta, self._takers[delta.choice].feed(delta.text, delta.ended))]
        has_tokens = delta.stop > delta.start and (self._is_scored or self.params.return_token_ids)
        if delta.choice not in self._begun:
            deltas = [{"role": "assistant", **(deltas[0] if deltas else {"content": ""})}, *deltas[1:]]
        elif not deltas and (delta.ended or has_tokens):
            deltas = [{}]
        events = b""
        for i, new in enumerate(deltas, 1):
            part = delta if i == len(deltas) else delta._replace(stop=delta.start, ended=False)
            events += super()._chunk(part, f'"delta":{self._dumps(new)}')
        return events

    def _scores(self, delta: Delta, inference: Inference) -> dict[str, Any]:
        return chat_logprobs(self.engine.tokenizer, scored_tokens(delta, inference), self.params.top_logprobs or 0)


def _delta(piece: Piece) -> dict[str, Any]:
    """Return a piece as the new part of a message."""
    if piece.kind == "call":
        call = {"index": piece.call, **_call(piece)}
    elif piece.kind == "arguments":
        call = {"index": piece.call, "function": {"arguments": piece.text}}
    else:
        return {NAMES[piece.kind]: piece.text}
    return {"tool_calls": [call]}


def _call(piece: Piece) -> dict[str, Any]:
    return {"id": piece.id, "type": "function", "function": {"name": piece.text, "arguments": ""}}


def _message(pieces: list[Piece]) -> dict[str, Any]:
    """Return a whole message."""
    message: dict[str, Any] = {"role": "assistant", "content": None if pieces else ""}
    calls = [_call(piece) for piece in pieces if piece.kind == "call"]
    for kind, text, call, _ in pieces:
        if kind == "arguments":
            calls[call]["function"]["arguments"] += text
        elif kind != "call":
            message[NAMES[kind]] = (message.get(NAMES[kind]) or "") + text
    return message | ({"tool_calls": calls} if calls else {})
