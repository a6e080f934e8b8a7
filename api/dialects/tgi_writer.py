"""How TGI's dialect writes an answer: whole, with details and headers, or one event for each token.

This module must not know how a request is checked or computed.
"""

from __future__ import annotations

import time
from typing import Any

from flask import Response, jsonify

from api import streaming
from api.dialects.logprobs import Pieces, prompt_scores
from api.generation import Generation, mean_score, timings
from api.schemas.tgi import GenerateParameters, GenerateRequest
from api.service import Engine
from api.streaming import Delta, StreamReader
from serving.inference import Inference


def samples(p: GenerateParameters | None) -> bool:
    """Return whether tokens are sampled: without parameters they are, otherwise if one of them implies it."""
    if p is None or p.do_sample:
        return True
    return any(v is not None for v in (p.temperature, p.top_k, p.top_p, p.typical_p))


class TgiWriter:
    """Writes the answer to one request, whole or one event for each token."""

    def __init__(self, engine: Engine, generation: Generation, params: GenerateRequest, began: float) -> None:
        self.tokenizer = engine.tokenizer
        self.device = engine.device
        self.generation = generation
        self.inputs = params.inputs
        self.parameters = params.parameters or GenerateParameters()
        self.sampled = samples(params.parameters)
        self.began = began
        self._pieces = Pieces(self.tokenizer)
        self._streamed = 0  # characters

    def whole(self, in_list: bool) -> Response:
        """Wait for the answer and return it in one piece, in a list for `POST /`."""
        self.generation.wait()
        order = range(len(self.generation.inferences))
        ranked = sorted(order, key=lambda i: mean_score(self.generation.inferences[i]), reverse=True)
        best, *others = ranked if len(ranked) > 1 else order
        result: dict[str, Any] = {"generated_text": self._text(self.generation.inferences[best])}
        if self.parameters.details or self.parameters.decoder_input_details:
            result["details"] = self._details(best)
            if others:
                result["details"]["best_of_sequences"] = [
                    {"generated_text": self._text(self.generation.inferences[i]), **self._details(i)} for i in others
                ]
        response = jsonify([result] if in_list else result)
        response.headers.update(self._headers(self.generation.inferences[best]))
        return response

    def _text(self, inference: Inference) -> str:
        return (self.inputs if self.parameters.return_full_text else "") + inference.answer

    def _seed(self, index: int) -> int | None:
        return self.generation.seeds[index] if self.sampled else None

    def _details(self, index: int) -> dict[str, Any]:
        inference = self.generation.inferences[index]
        details = inference.details
        result = {
            "finish_reason": finish_reason(inference),
            "generated_tokens": len(inference.output_ids),
            "seed": self._seed(index),
            "prefill": self._prefill(inference) if self.parameters.decoder_input_details else [],
            "tokens": [
                self._token(token, text, detail.logprob)
                for token, text, detail in zip(inference.output_ids, self._texts(inference), details)
            ],
        }
        if self.parameters.top_n_tokens:
            result["top_tokens"] = [self._top(detail) for detail in details]
        return result

    def _texts(self, inference: Inference) -> list[str]:
        """Return the text that each token adds; the last one has the rest of the answer."""
        pieces, ids = Pieces(self.tokenizer), inference.output_ids
        texts = ["" if self._is_special(token) else pieces.add(token) for token in ids]
        last = self._last_of_text(ids)
        if last is not None:
            texts[last] = inference.answer[len("".join(texts[:last])) :]
        return texts

    def _last_of_text(self, ids: list[int]) -> int | None:
        """Return the place of the last token that has a part in the text."""
        return max((i for i, token in enumerate(ids) if not self._is_special(token)), default=None)

    def _prefill(self, inference: Inference) -> list[dict[str, Any]]:
        pieces, seq = Pieces(self.tokenizer), inference.sequence
        return [
            {"id": token, "text": pieces.add(token), "logprob": detail and detail.logprob}
            for token, detail in prompt_scores(seq.prompt_ids, seq.prompt_details)
        ]

    def _is_special(self, token: int) -> bool:
        return token in self.tokenizer.special_ids

    def _token(self, token: int, text: str, logprob: float) -> dict[str, Any]:
        special = self._is_special(token)
        text = self.tokenizer.decode([token]) if special else text
        return {"id": token, "text": text, "logprob": logprob, "special": special}

    def _top(self, detail: Any) -> list[dict[str, Any]]:
        return [self._token(id, self.tokenizer.decode([id]), value) for id, value in detail.top]

    def _headers(self, inference: Inference) -> dict[str, str]:
        """Return TGI's response headers, with times in whole milliseconds."""
        times, tokens = timings(inference), len(inference.output_ids)
        arrived = inference.sequence.arrived_at
        queue, total = times["queue_s"] or 0.0, times["total_s"] or 0.0
        seconds = {
            "x-compute-time": total - queue,
            "x-total-time": time.perf_counter() - self.began,
            "x-validation-time": arrived - self.began,
            "x-queue-time": queue,
            "x-inference-time": total - queue,
            "x-time-per-token": (total - queue) / max(1, tokens),
        }
        return {
            "x-compute-type": self.device,
            "x-compute-characters": str(len(self.inputs)),
            **{name: str(round(1000 * value)) for name, value in seconds.items()},
            "x-prompt-tokens": str(len(inference.sequence.prompt_ids)),
            "x-generated-tokens": str(tokens),
        }

    def stream(self) -> Response:
        """Return the answer as a stream."""
        reader = StreamReader(0, self.generation.inferences[0], scored=True)
        response = streaming.respond(self.generation, [reader], self._events, lambda: b"", space=b"")
        response.headers["x-compute-type"] = self.device
        response.headers["x-compute-characters"] = str(len(self.inputs))
        return response

    def _events(self, delta: Delta) -> bytes:
        """Return an event for each new token; their texts join to the answer, of which the last one has the rest."""
        inference = self.generation.inferences[0]
        seq, events = inference.sequence, []
        last = self._last_of_text(seq.output_ids[: delta.stop]) if delta.ended else None
        for at in range(delta.start, delta.stop):
            token, detail = seq.output_ids[at], seq.details[at]
            text = "" if self._is_special(token) else self._pieces.add(token)
            if at == last:
                text = inference.answer[self._streamed :]
            self._streamed += len(text)
            event: dict[str, Any] = {
                "index": at + 1,
                "token": self._token(token, text, detail.logprob),
                "generated_text": None,
                "details": None,
            }
            if self.parameters.top_n_tokens:
                event["top_tokens"] = self._top(detail)
            events.append(event)
        if delta.ended and events:
            events[-1] |= self._ending(delta)
        return b"".join(streaming.event(event, b"") for event in events)

    def _ending(self, delta: Delta) -> dict[str, Any]:
        inference = self.generation.inferences[0]
        details = {
            "finish_reason": finish_reason(inference),
            "generated_tokens": delta.stop,
            "seed": self._seed(0),
            "input_length": len(inference.sequence.prompt_ids),
        }
        return {"generated_text": self._text(inference), "details": details}


def finish_reason(inference: Inference) -> str:
    """Return TGI's name for how an answer ended."""
    if inference.finish_reason != "stop":
        return "length"
    return "eos_token" if inference.stop_reason is None else "stop_sequence"
