"""POST /v1/responses: OpenAI's newer form of a chat, whose answer is a list of items. Nothing is stored.

A request becomes a chat, which decides everything; this module only knows how responses are written.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, NamedTuple

from flask import Blueprint, Response, g, jsonify

from api import streaming
from api.answer_parts import CLOSE, AnswerParts, Piece
from api.dialects.chat import generation_request
from api.dialects.openai import begin
from api.dialects.openai_writer import usage
from api.generation import Generation, reply, start_generation
from api.http.deferral import Deferred
from api.http.errors import renaming
from api.http.openapi import Operation
from api.schemas.responses import ResponsesRequest
from api.service import Engine, Service
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
OPERATIONS = [
    Operation(
        "post", "/v1/responses", "answer a conversation with a list of items, in OpenAI's newer API", "openai",
        body=ResponsesRequest, generates=True, streams=True, example={"input": "Who are you?", "max_output_tokens": 8},
        answer={
            "type": "object", "required": ["id", "object", "created_at", "status", "model", "output", "usage"],
            "properties": {"object": {"const": "response"}, "output": {"type": "array"}, "usage": {"type": "object"}},
        },
    ),
]  # fmt: skip


class Item(NamedTuple):
    """An item of a kind: its type, how its id begins, its events or its part, and further fields of these and the item."""

    type: str
    prefix: str
    part: str
    scores: dict[str, Any]
    fields: dict[str, Any]


ITEMS = {  # by the kind of their pieces
    "reasoning": Item("reasoning", "rs", "reasoning_text", {}, {"summary": [], "content": []}),
    "content": Item("message", "msg", "output_text", {"logprobs": []}, {"role": "assistant", "content": []}),
    "arguments": Item("function_call", "fc", "function_call_arguments", {}, {"arguments": ""}),
}


def blueprint(service: Service) -> Blueprint:
    """Return the route."""
    routes = Blueprint("responses", __name__)

    @routes.post("/v1/responses")
    def responses() -> Any:
        engine, params, adapter, ignored = begin(service, ResponsesRequest, EXAMPLE)
        with renaming(NAMES):
            generating = generation_request(engine, params.chat(), adapter)
            generation = start_generation(service, engine, generating, streams=params.stream)
        return ResponseWriter(engine, generation, params).reply(ignored)

    return routes


class ResponseWriter:
    """Writes the answer to one request, as events or whole: then it is what its events add up to."""

    def __init__(self, engine: Engine, generation: Generation, params: ResponsesRequest) -> None:
        self._generation, self._params = generation, params
        self._decode = engine.tokenizer.decode_bytes
        make = generation.request.parts
        self._taker: AnswerParts | None = make() if make is not None else None
        self._id = g.request_id
        options = generation.request.options
        self._head = {
            "id": f"resp_{self._id}", "object": "response", "created_at": int(time.time()),
            "model": params.model or engine.served_name, "temperature": options["temperature"], "top_p": options["top_p"],
            "background": False, "previous_response_id": None, "store": False, "truncation": "disabled",
            **params.model_dump(include=REPEATED),
        }  # fmt: skip
        self._output: list[dict[str, Any]] = []
        self._kind = ""  # of the pieces of the last item, while that is open
        self._texts: list[str] = []
        self._number = 0  # of the next event

    def reply(self, ignored: list[str]) -> Response | Deferred:
        """Return the answer, whole or as a stream; it names the ignored fields."""
        return reply(self._generation, self._stream if self._params.stream else self._whole, ignored)

    def _whole(self) -> Response:
        self._generation.wait()
        inference = self._generation.inferences[0]
        self._chunk(Delta(0, inference.answer, 0, len(inference.output_ids), True))
        return jsonify(self._response(self._status))

    def _stream(self) -> Response:
        return streaming.respond(
            self._generation, self._chunk, lambda: self._event(self._status, response=self._response(self._status)),
            tokens_together=self._params.stream_interval, event=self._failure,
        )  # fmt: skip

    @property
    def _status(self) -> str:
        return "incomplete" if self._generation.inferences[0].finish_reason == "length" else "completed"

    def _event(self, kind: str, **fields: Any) -> bytes:
        frame = event(f"response.{kind}", {"type": f"response.{kind}", "sequence_number": self._number, **fields})
        self._number += 1
        return frame

    def _begin(self) -> Iterator[bytes]:
        if not self._number:
            for name in ("created", "in_progress"):
                yield self._event(name, response=self._response("in_progress"))

    def _chunk(self, delta: Delta) -> bytes:
        return b"".join([*self._begin(), *self._events(delta)])

    def _events(self, delta: Delta) -> Iterator[bytes]:
        if self._taker is None:
            pieces = [Piece("content", delta.text)]
        else:
            pieces = self._taker.feed(delta.text) + (self._taker.finish() if delta.ended else [])
        if delta.ended and not pieces and not self._output:
            pieces = [Piece("content", "")]
        for piece in pieces:
            if piece.kind != self._kind:
                yield from self._close("completed")
                yield from self._open(piece)
            if piece.kind != "call" and piece.text:
                self._texts.append(piece.text)
                item = ITEMS[self._kind]
                yield self._event(f"{item.part}.delta", **self._place, delta=piece.text, **item.scores)
        if delta.ended:
            yield from self._close(self._status)

    @property
    def _place(self) -> dict[str, Any]:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return place if self._kind == "arguments" else {**place, "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        item = ITEMS[self._kind]
        return {"type": item.part, "text": text, **({"annotations": [], **item.scores} if item.scores else {})}

    def _open(self, piece: Piece) -> Iterator[bytes]:
        """Begin the item of a piece."""
        self._kind = "arguments" if piece.kind == "call" else piece.kind
        item = ITEMS[self._kind]
        id = f"{item.prefix}_{self._id}_{len(self._output)}"
        called = {"call_id": piece.id, "name": piece.text} if piece.kind == "call" else {}
        self._output.append({"type": item.type, "id": id, "status": "in_progress", **called, **item.fields})
        yield self._event("output_item.added", output_index=len(self._output) - 1, item=self._output[-1])
        if self._kind != "arguments":
            yield self._event("content_part.added", **self._place, part=self._part(""))

    def _close(self, status: str) -> Iterator[bytes]:
        """End the open item, if any."""
        if not self._kind:
            return
        item, text = self._output[-1], "".join(self._texts)
        done = f"{ITEMS[self._kind].part}.done"
        if self._kind == "arguments":
            item["arguments"] = text
            yield self._event(done, **self._place, name=item["name"], arguments=text)
        else:
            item["content"] = [self._part(text)]
            yield self._event(done, **self._place, text=text, **ITEMS[self._kind].scores)
            yield self._event("content_part.done", **self._place, part=item["content"][0])
        item["status"] = status
        yield self._event("output_item.done", output_index=len(self._output) - 1, item=item)
        self._kind, self._texts = "", []

    def _failure(self, content: Any) -> bytes:
        """Return the last events of a stream that fails."""
        error = {"code": content["error"]["code"] or content["error"]["type"], "message": content["error"]["message"]}
        closing = [*self._begin(), *self._close("incomplete")]
        return b"".join([*closing, self._event("failed", response=self._response("failed", error))])

    def _response(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._head | {
            "status": status, "error": error, "output": self._output,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": self._usage() if status in ("completed", "incomplete") else None,
        }  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        inferences = self._generation.inferences
        counts, ids, thinking = usage(self._generation, inferences), inferences[0].output_ids, 0
        if self._output[0]["type"] == "reasoning":
            thinking = bisect_left(range(len(ids)), True, key=lambda n: CLOSE.encode() in self._decode(ids[:n]))
        return {
            "input_tokens": counts["prompt_tokens"], "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"], "output_tokens_details": {"reasoning_tokens": thinking},
            "total_tokens": counts["total_tokens"],
        }  # fmt: skip
