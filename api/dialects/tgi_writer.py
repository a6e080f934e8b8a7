"""How TGI's dialect writes an answer: whole, with details and headers, or one event for each token.

This module must not know how a request is checked or computed.
"""

from __future__ import annotations

import time
from typing import Any

from flask import Response, jsonify

from api import streaming
from api.dialects.logprobs import Pieces, prompt_scores
from api.generation import Generation, timings
from api.schemas.tgi import GenerateParameters, GenerateRequest
from api.service import LoadedEngine, Tokenizer
from api.streaming import Delta
from observe.feed import dumps
from serving.inference import Inference


def samples(p: GenerateParameters | None) -> bool:
    """Return whether tokens are sampled: without parameters they are, otherwise if one of them implies it."""
    if p is None or p.do_sample:
        return True
    return any(v is not None for v in (p.temperature, p.top_k, p.top_p, p.typical_p))


class TgiWriter:
    """Writes the answer to one request, whole or one event for each token."""

    def __init__(self, engine: LoadedEngine, generation: Generation, params: GenerateRequest, began: float) -> None:
        self.tokenizer = engine.tokenizer
        self._headers_of_request = {"x-compute-type": engine.device, "x-compute-characters": str(len(params.inputs))}
        self.generation = generation
        self.inference = generation.inferences[0]
        self.inputs = params.inputs
        self.parameters = params.parameters or GenerateParameters()
        self.sampled = samples(params.parameters)
        self.began = began

    def whole(self, in_list: bool) -> Response:
        """Return the answer in one piece, in a list for `POST /`."""
        result: dict[str, Any] = {"generated_text": self._text()}
        if self.parameters.details or self.parameters.decoder_input_details:
            result["details"] = self._details()
        response = jsonify([result] if in_list else result)
        response.headers.update(self._headers())
        return response

    def _text(self) -> str:
        return (self.inputs if self.parameters.return_full_text else "") + self.inference.answer

    def _ending(self) -> dict[str, Any]:
        return {
            "finish_reason": finish_reason(self.inference),
            "generated_tokens": len(self.inference.output_ids),
            "seed": self.generation.seed if self.sampled else None,
        }

    def _details(self) -> dict[str, Any]:
        inference = self.inference
        tokens = Tokens(self.tokenizer, inference).write(0, len(inference.output_ids), ended=True)
        result = self._ending() | {
            "prefill": self._prefill() if self.parameters.decoder_input_details else [],
            "tokens": tokens,
        }
        if self.parameters.top_n_tokens:
            result["top_tokens"] = [self._top(detail) for detail in inference.details]
        return result

    def _prefill(self) -> list[dict[str, Any]]:
        pieces, seq = Pieces(self.tokenizer), self.inference.sequence
        return [
            {"id": token, "text": pieces.add(token), "logprob": detail and detail.logprob}
            for token, detail in prompt_scores(seq.prompt_ids, seq.prompt_details)
        ]

    def _top(self, detail: Any) -> list[dict[str, Any]]:
        return [entry(self.tokenizer, id, self.tokenizer.decode([id]), value) for id, value in detail.top]

    def _headers(self) -> dict[str, str]:
        """Return TGI's response headers, with times in whole milliseconds."""
        seq, times, tokens = self.inference.sequence, timings(self.inference), len(self.inference.output_ids)
        queue, total = times["queue_s"] or 0.0, times["total_s"] or 0.0
        seconds = {
            "x-compute-time": total - queue,
            "x-total-time": time.perf_counter() - self.began,
            "x-validation-time": seq.arrived_at - self.began,
            "x-queue-time": queue,
            "x-inference-time": total - queue,
            "x-time-per-token": (total - queue) / max(1, tokens),
        }
        return {
            **self._headers_of_request,
            **{name: str(round(1000 * value)) for name, value in seconds.items()},
            "x-prompt-tokens": str(len(seq.prompt_ids)),
            "x-generated-tokens": str(tokens),
        }

    def stream(self) -> Response:
        """Return the answer as a stream."""
        self._tokens = Tokens(self.tokenizer, self.inference)
        response = streaming.respond(self.generation, self._events, lambda: b"", scored=True, event=event)
        response.headers.update(self._headers_of_request)
        return response

    def _events(self, delta: Delta) -> bytes:
        """Return an event for each new token."""
        details = self.inference.sequence.details
        events: list[dict[str, Any]] = []
        for at, token in enumerate(self._tokens.write(delta.start, delta.stop, ended=delta.ended), delta.start):
            events.append({"index": at + 1, "token": token, "generated_text": None, "details": None})
            if self.parameters.top_n_tokens:
                events[-1]["top_tokens"] = self._top(details[at])
        if delta.ended and events:
            ending = self._ending() | {"input_length": len(self.inference.sequence.prompt_ids)}
            events[-1] |= {"generated_text": self._text(), "details": ending}
        return b"".join(map(event, events))


class Tokens:
    """Writes the tokens of one answer, all at once or in pieces that continue each other.

    Their texts join to the answer: the last token that has a part in it has the rest of it.
    """

    def __init__(self, tokenizer: Tokenizer, inference: Inference) -> None:
        self._tokenizer = tokenizer
        self._inference = inference
        self._pieces = Pieces(tokenizer)
        self._written = 0  # characters of the answer

    def write(self, start: int, stop: int, *, ended: bool) -> list[dict[str, Any]]:
        """Return the tokens start..stop, the last ones if the answer has `ended`."""
        seq, special, written = self._inference.sequence, self._tokenizer.special_ids, []
        last = max((i for i in range(stop) if seq.output_ids[i] not in special), default=None) if ended else None
        for at in range(start, stop):
            token = seq.output_ids[at]
            text = "" if token in special else self._pieces.add(token)
            if at == last:
                text = self._inference.answer[self._written :]
            self._written += len(text)
            written.append(entry(self._tokenizer, token, text, seq.details[at].logprob))
        return written


def entry(tokenizer: Tokenizer, token: int, text: str, logprob: float) -> dict[str, Any]:
    """Return the entry of a token; a special one has its own text, which is no part of the answer's."""
    is_special = token in tokenizer.special_ids
    text = tokenizer.decode([token]) if is_special else text
    return {"id": token, "text": text, "logprob": logprob, "special": is_special}


def event(value: Any) -> bytes:
    """Return one event; unlike OpenAI's, TGI's have no space before their JSON."""
    return b"data:" + dumps(value).encode() + b"\n\n"


def finish_reason(inference: Inference) -> str:
    """Return TGI's name for how an answer ended."""
    if inference.finish_reason != "stop":
        return "length"
    return "eos_token" if inference.stop_reason is None else "stop_sequence"
