"""POST /v1/responses: OpenAI's newer form of a chat, whose answer is a list of items. Nothing is stored.

A request becomes a chat, which decides everything; this module only knows how responses are written.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Generator, Iterator
from typing import Any, Literal, NamedTuple

from flask import Response, g, jsonify

from api import streaming
from api.answer_parts import Piece
from api.dialects import tools
from api.dialects.chat import generation_request
from api.dialects.openai import begin
from api.dialects.openai_writer import usage
from api.generation import Generation, reply, start_generation
from api.http.deferral import Deferred
from api.http.errors import renaming
from api.http.openapi import Object, Routes, TypedDict
from api.schemas.responses import ResponsesRequest
from api.service import LoadedEngine, Service
from api.streaming import Delta
from observe.feed import event

EXAMPLE = '{"input": "Who are you?"}'
NAMES = {
    "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}  # fmt: skip
REPEATED = {
    "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "reasoning", "text", "tools", "tool_choice",
}  # fmt: skip
# By the kind of pieces: the type of an item, how its id begins, its part or its events, and what else item and part have.
ITEMS: dict[str, tuple[str, str, str, dict[str, Any], dict[str, Any]]] = {
    "reasoning": ("reasoning", "rs", "reasoning_text", {"summary": [], "content": []}, {}),
    "content": (
        "message",
        "msg",
        "output_text",
        {"role": "assistant", "content": []},
        {"annotations": [], "logprobs": []},
    ),
    "call": ("function_call", "fc", "function_call_arguments", {"arguments": ""}, {}),
}
ResponsesAnswer = TypedDict("ResponsesAnswer", {
    "id": str, "object": Literal["response"], "created_at": int, "status": str, "model": str, "output": list[Object],
    "usage": Object,
})  # fmt: skip


def routes_of(service: Service) -> Routes:
    """Return the route."""
    routes = Routes("responses", "openai")

    @routes.post(
        "/v1/responses", "answer a conversation with a list of items, in OpenAI's newer API", body=ResponsesRequest,
        answer=ResponsesAnswer, generates=True, streams=True,
        example={"input": [{"role": "user", "content": "Who are you?"}], "max_output_tokens": 8},
    )  # fmt: skip
    def responses() -> Any:
        engine, params, adapter, ignored = begin(service, ResponsesRequest, EXAMPLE)
        with renaming(NAMES):
            generating = generation_request(engine, params.chat(), adapter)
            generation = start_generation(service, engine, generating, streams=params.stream)
        return ResponseWriter(engine, generation, params).reply(ignored)

    return routes


class Part(NamedTuple):
    """The growing part of the last item: the kind of its pieces, its name in events, its place, and its texts so far."""

    kind: str
    name: str
    place: dict[str, Any]
    more: dict[str, Any]  # that it has beside its text
    texts: list[str]

    @property
    def scores(self) -> dict[str, Any]:
        """The log probabilities that events of a text must have, always none."""
        return {"logprobs": []} if "logprobs" in self.more else {}

    def written(self, text: str) -> dict[str, Any]:
        """Return it with this text."""
        return {"type": self.name, "text": text, **self.more}


class ResponseWriter:
    """Writes the answer to one request, as events or whole: then it is what its events add up to."""

    def __init__(self, engine: LoadedEngine, generation: Generation, params: ResponsesRequest) -> None:
        self._engine, self._generation, self._params = engine, generation, params
        self._inference, self._id = generation.inferences[0], g.request_id
        self._taker, options = tools.parts_of(engine, generation), generation.request.options
        self._head = {
            "id": f"resp_{self._id}", "object": "response", "created_at": int(time.time()),
            "model": params.model or engine.served_name, "temperature": options["temperature"], "top_p": options["top_p"],
            "background": False, "previous_response_id": None, "store": False, "truncation": "disabled",
            **params.model_dump(include=REPEATED),
        }  # fmt: skip
        self._events = 0  # sent so far
        self._output: list[dict[str, Any]] = []
        self._part: Part | None = None

    def reply(self, ignored: list[str]) -> Response | Deferred:
        """Return the answer, whole or as a stream; it names the ignored fields."""
        return reply(self._generation, ignored, self._whole, self._stream)

    def _whole(self) -> Response:
        self._chunk(Delta(0, self._inference.answer, 0, len(self._inference.output_ids), True))
        return jsonify(self._response(self._status))

    def _stream(self) -> Response:
        return streaming.respond(
            self._generation, self._chunk, lambda: self._event(self._status, response=self._response(self._status)),
            tokens_together=self._params.stream_interval, event=self._failure,
        )  # fmt: skip

    @property
    def _status(self) -> str:
        return "incomplete" if self._inference.finish_reason == "length" else "completed"

    def _chunk(self, delta: Delta) -> bytes:
        """Return the events of a delta."""
        pieces = self._taker.feed(delta.text, delta.ended)
        if delta.ended and not pieces and not self._output:
            pieces = [Piece("content", "")]
        frames = [*self._begin()]
        for piece in pieces:
            frames += self._add(piece)
        return b"".join([*frames, *(self._close(self._status) if delta.ended else ())])

    def _failure(self, content: Any) -> bytes:
        """Return the last events of a stream that fails."""
        error = {"code": content["error"]["code"] or content["error"]["type"], "message": content["error"]["message"]}
        frames = [*self._begin(), *self._close("incomplete")]
        return b"".join([*frames, self._event("failed", response=self._response("failed", error))])

    def _event(self, kind: str, **fields: Any) -> bytes:
        frame = event(f"response.{kind}", {"type": f"response.{kind}", "sequence_number": self._events, **fields})
        self._events += 1
        return frame

    def _begin(self) -> Iterator[bytes]:
        if not self._events:
            for kind in ("created", "in_progress"):
                yield self._event(kind, response=self._response("in_progress"))

    def _add(self, piece: Piece) -> Iterator[bytes]:
        """Add a piece to the open item, or begin another with it."""
        part = self._part
        if part is None or piece.kind != part.kind:
            yield from self._close("completed")
            part = self._part = yield from self._open(piece)
        if piece.text and piece.kind != "call":
            part.texts.append(piece.text)
            yield self._event(f"{part.name}.delta", **part.place, delta=piece.text, **part.scores)

    def _open(self, piece: Piece) -> Generator[bytes, None, Part]:
        is_call, index = piece.kind == "call", len(self._output)
        type, prefix, name, fields, more = ITEMS[piece.kind]
        named = {"call_id": piece.id, "name": piece.text} if is_call else {}
        item = {"type": type, "id": f"{prefix}_{self._id}_{index}", "status": "in_progress", **named, **fields}
        place = {"item_id": item["id"], "output_index": index, **({} if is_call else {"content_index": 0})}
        part = Part("arguments" if is_call else piece.kind, name, place, more, [])
        self._output.append(item)
        yield self._event("output_item.added", output_index=index, item=item)
        if not is_call:
            yield self._event("content_part.added", **place, part=part.written(""))
        return part

    def _close(self, status: str) -> Iterator[bytes]:
        """End the open item, if any."""
        part, self._part = self._part, None
        if part is None:
            return
        item, text = self._output[-1], "".join(part.texts)
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._event(f"{part.name}.done", **part.place, name=item["name"], arguments=text)
        else:
            item["content"] = [part.written(text)]
            yield self._event(f"{part.name}.done", **part.place, text=text, **part.scores)
            yield self._event("content_part.done", **part.place, part=part.written(text))
        item["status"] = status
        yield self._event("output_item.done", output_index=len(self._output) - 1, item=item)

    def _response(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._head | {
            "status": status, "error": error, "output": self._output,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": self._usage() if status in ("completed", "incomplete") else None,
        }  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        counts, ids, thinking = usage(self._generation), self._inference.output_ids, 0
        if self._output[0]["type"] == "reasoning":
            text = self._engine.tokenizer
            close = text.tool_format.thinking_tags[1].encode()
            thinking = bisect_left(range(len(ids)), True, key=lambda n: close in text.decode_bytes(ids[:n]))
        return {
            "input_tokens": counts["prompt_tokens"], "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"], "output_tokens_details": {"reasoning_tokens": thinking},
            "total_tokens": counts["total_tokens"],
        }  # fmt: skip
