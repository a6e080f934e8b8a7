"""Anthropic's dialect: POST /v1/messages, as an answer to a chat, and the number of tokens of its prompt."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, TypeVar

from flask import Response, g, jsonify, request

from api import streaming
from api.answer_parts import Piece
from api.dialects import tokens, tools
from api.dialects.chat import generation_request, prompt_and_calls
from api.generation import Generation, check_model, constraint, ignored_hints, ready_engine, reply, start_generation
from api.http.errors import ApiError
from api.http.openapi import Routes, TypedDict
from api.schemas import body
from api.schemas.messages import READ, RESULTS, Block, CountRequest, MessagesRequest
from api.schemas.openai import ChatRequest
from api.schemas.scheduling_hints import SchedulingHints
from api.service import LoadedEngine, Service
from api.streaming import Delta
from observe.feed import dumps
from serving.adapters import Loaded

EXAMPLE = '{"max_tokens": 100, "messages": [{"role": "user", "content": "Who are you?"}]}'
SENT: dict[str, Any] = {"max_tokens": 8, "messages": [{"role": "user", "content": "Who are you?"}]}
MessagesAnswer = TypedDict("MessagesAnswer", {
    "id": str, "type": Literal["message"], "role": Literal["assistant"], "model": str, "content": list[Block],
    "stop_reason": str, "stop_sequence": str | None, "usage": dict[str, int],
})  # fmt: skip
TokenCount = TypedDict("TokenCount", {"input_tokens": int})
SAME = {"model", "max_tokens", "temperature", "top_p", "top_k", "seed", *SchedulingHints.model_fields}  # in a chat
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
NAMES = {"content": "text", "reasoning": "thinking"}  # of the kinds of pieces: their blocks, and the text in these
Asked = TypeVar("Asked", bound=CountRequest)


def routes_of(service: Service) -> Routes:
    """Return the routes of this dialect."""
    routes = Routes("messages", "anthropic")

    @routes.post(
        "/v1/messages", "answer a conversation (Anthropic's API)", body=MessagesRequest, example=SENT,
        answer=MessagesAnswer, generates=True, streams=True,
    )  # fmt: skip
    def messages() -> Any:
        engine, params, adapter, ignored = _begin(service, MessagesRequest)
        generating = generation_request(engine, chat_request(engine, params), adapter)
        if len(generating.prompts[0].ids) + params.max_tokens > engine.context:
            generating = replace(generating, max_tokens=None)  # as Anthropic's: clients send limits of larger models
        generation = start_generation(service, engine, generating, streams=params.stream)
        writer = MessageWriter(engine, generation, params)
        return reply(generation, ignored + ignored_hints(engine, params), writer.whole, writer.stream)

    @routes.post(
        "/v1/messages/count_tokens", "the number of tokens of a conversation (Anthropic's API)", body=CountRequest,
        example={"messages": SENT["messages"]}, answer=TokenCount, errors=(404, 429, 529),
    )  # fmt: skip
    def count_tokens() -> Response:
        tokens.admit(service)
        engine, params, _, ignored = _begin(service, CountRequest)
        prompt, _ = prompt_and_calls(engine, chat_request(engine, params))
        return body.name_ignored(jsonify(input_tokens=len(prompt.ids)), ignored)

    return routes


def _begin(service: Service, schema: type[Asked]) -> tuple[LoadedEngine, Asked, Loaded | None, list[str]]:
    """Check the current request; return the engine, the request, its adapter, and the names of fields without effect."""
    engine, fields = ready_engine(service), body.take(request, EXAMPLE)
    if fields.get("thread") is not None:  # with this code, clients send the whole conversation instead
        raise ApiError(
            "thread is not supported, as the server keeps no conversations. Send all messages, without thread",
            param="thread", code="thread_unsupported_request",
        )  # fmt: skip
    params, ignored = body.validate(schema, fields)
    for i, message in enumerate(params.messages):
        for j, block in enumerate(message.content):
            ignored += [f"messages.{i}.content.{j}.{name}" for name in block if name not in READ]
    if params.output_config.format and params.output_format:  # the former is the newer name
        ignored.append("output_format")
    return engine, params, check_model(engine, params.model), ignored


def chat_request(engine: LoadedEngine, params: CountRequest) -> ChatRequest:
    """Return a request in the terms of a chat; raise ApiError where that has none."""
    fields = params.model_dump(include=SAME, exclude_unset=True)
    messages = [{"role": "system", "content": _text(params.system)}] if params.system else []
    for message in params.messages:
        messages += _chat_messages(message.role, message.content)
    results = [block for message in params.messages for block in message.content if block["type"] == "tool_result"]
    found = {part.get("tool_name") for block in results for part in block["content"]} | {params.tool_choice.name}
    offered = [tool for tool in params.tools if not tool.defer_loading or tool.name in found]
    form = params.output_config.format or params.output_format
    if form is not None:
        # So that an error has the name of the field.
        constraint(engine, "output_config" if params.output_config.format else "output_format", form)
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.source}}
    last, choice, thinking = messages[-1], params.tool_choice, params.thinking.type
    if last["role"] == "assistant":
        if last["tool_calls"] or not last["content"] or form:
            raise ApiError(
                "the last message is the assistant's, so that the answer continues it, but only text without tool_use and "
                "without a form of the answer can be continued. End with a message of the user", param="messages",
            )  # fmt: skip
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if thinking == "enabled" and not engine.tokenizer.tool_format.thinks:
        raise ApiError(
            'thinking is "enabled", but this model has no thinking part. Send {"type": "disabled"}', param="thinking"
        )
    if not {"any": params.tools, "tool": choice.name}.get(choice.type, True):
        raise ApiError(
            f'tool_choice is "{choice.type}", but "any" needs tools, and "tool" the name of one. Send these', param="tool_choice"
        )  # fmt: skip
    return body.validate(ChatRequest, fields | {
        "messages": messages, "stop": getattr(params, "stop_sequences", []),
        "chat_template_kwargs": {"enable_thinking": thinking != "disabled"},
        "tools": [{"type": "function", "function": {**dict(tool), "parameters": tool.input_schema}} for tool in offered],
        "tool_choice": CHOICES.get(choice.type, {"type": "function", "function": {"name": choice.name}}),
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    })[0]  # fmt: skip


def _chat_messages(role: str, content: list[Block]) -> list[dict[str, Any]]:
    """Return a message as those of a chat: the results of tools first, each in one of its own."""
    results, calls, text = list[dict[str, Any]](), list[dict[str, Any]](), _text(content)
    for block in content:
        if block["type"] == "tool_result":
            answer = ("Error: " if block.get("is_error") else "") + _text(block["content"])
            results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": answer})
        elif block["type"] == "tool_use":
            function = {"name": block["name"], "arguments": block["input"]}
            calls.append({"id": block["id"], "type": "function", "function": function})
    if results and not text:
        return results
    thought = "".join(block["thinking"] for block in content if block["type"] == "thinking") or None
    written = text or (None if calls else "")
    return [*results, {"role": role, "content": written, "tool_calls": calls, "reasoning_content": thought}]


def _text(content: list[Block]) -> str:
    return "\n".join(block.get("text") or block.get("tool_name", "") for block in content if block["type"] in RESULTS)


class MessageWriter:
    """Writes the answer to one request, whole or as events."""

    def __init__(self, engine: LoadedEngine, generation: Generation, params: MessagesRequest) -> None:
        self.generation = generation
        self._stops = params.stop_sequences
        self._model = params.model or engine.served_name
        self._id = f"msg_{g.request_id}"
        self._taker = tools.parts_of(engine, generation)
        self._index, self._kind = -1, ""  # of the open block

    def whole(self) -> Response:
        """Return the answer in one piece, without a call that was cut off: its input would be another."""
        inference, content = self.generation.inferences[0], list[Block]()
        for piece in self._taker.feed(inference.answer, ended=True):
            if piece.kind == "call":
                call = _block(piece)
            elif piece.kind == "arguments":  # all of them, as the whole answer is taken apart at once
                with suppress(ValueError):
                    content.append(call | {"input": json.loads(piece.text)})
            else:
                name = NAMES[piece.kind]
                if not content or content[-1]["type"] != name:
                    content.append(_block(piece))
                content[-1][name] += piece.text
        return jsonify(self._message(content, len(inference.output_ids)) | self._ending())

    def stream(self) -> Response:
        """Return the answer as a stream."""
        return streaming.respond(self.generation, self._chunk, self._end, event=_event)

    def _chunk(self, delta: Delta) -> bytes:
        """Return the events of what is new."""
        events: list[dict[str, Any]] = []
        if not self._kind:
            events += [{"type": "message_start", "message": self._message([], delta.stop)}, {"type": "ping"}]
            self._kind = "none"
        for piece in self._taker.feed(delta.text, delta.ended):
            if piece.kind != self._kind:  # a call, as its arguments follow, always begins a block
                events += self._stop()
                self._index += 1
                events.append({"type": "content_block_start", "index": self._index, "content_block": _block(piece)})
                self._kind = "arguments" if piece.kind == "call" else piece.kind
            if piece.kind != "call":
                name = NAMES.get(piece.kind)
                new = {"type": f"{name}_delta", name: piece.text} if name else {"type": "input_json_delta", "partial_json": piece.text}  # fmt: skip
                events.append({"type": "content_block_delta", "index": self._index, "delta": new})
        return b"".join(map(_event, events + (self._stop() if delta.ended else [])))

    def _stop(self) -> list[dict[str, Any]]:
        return [{"type": "content_block_stop", "index": self._index}] if self._index >= 0 else []

    def _end(self) -> bytes:
        usage = self._usage(len(self.generation.inferences[0].output_ids))
        ending = {"type": "message_delta", "delta": self._ending(), "usage": usage}
        return _event(ending) + _event({"type": "message_stop"})

    def _message(self, content: list[Block], tokens: int) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content,
            "stop_reason": None, "stop_sequence": None, "usage": self._usage(tokens),
        }  # fmt: skip

    def _ending(self) -> dict[str, Any]:
        inference, is_own = self.generation.inferences[0], self.generation.request.max_tokens is not None
        sequence = inference.stop_reason if inference.stop_reason in self._stops else None
        if inference.finish_reason != "stop":
            reason = "max_tokens" if is_own else "model_context_window_exceeded"
        elif self._taker.has_called:
            reason = "tool_use"
        else:
            reason = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self, tokens: int) -> dict[str, int]:
        """Return the token usage; tokens that the prefix cache had are apart from the other ones of the prompt."""
        seq = self.generation.inferences[0].sequence
        cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": seq.cached}
        return {"input_tokens": len(seq.prompt_ids) - seq.cached, **cache, "output_tokens": tokens}


def _block(piece: Piece) -> Block:
    """Return the block that a piece begins, still empty."""
    if piece.kind == "call":
        return {"type": "tool_use", "id": piece.id, "name": piece.text, "input": {}}
    name = NAMES[piece.kind]
    return {"type": name, name: "", **({"signature": ""} if name == "thinking" else {})}


def _event(value: dict[str, Any]) -> bytes:
    """Return one event, whose name is the type of its content."""
    return f"event: {value['type']}\ndata: {dumps(value)}\n\n".encode()
