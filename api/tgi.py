"""TGI's dialect: POST /generate and /generate_stream, POST / with inputs, GET /info."""

from __future__ import annotations

import time
from typing import Any

from flask import Blueprint, Response, g, jsonify, request

import config as settings
from api import admission, body, generation, streaming
from api.errors import ApiError
from api.generation import Ask, Job, Prompt
from api.logprobs import Pieces, prompt_scores
from api.openapi import Operation
from api.schemas import CompatRequest, GenerateParameters, GenerateRequest, StreamRequest
from api.schemas.tgi import UNSUPPORTED_PARAMETERS
from api.service import Engine, Service
from api.streaming import Follower, Growth
from inference import Inference

EXAMPLE = '{"inputs": "ROMEO:", "parameters": {"max_new_tokens": 40}}'
SENT = {"inputs": "ROMEO:", "parameters": {"max_new_tokens": 8}}
GREETING = "effective-batching is here: POST /inference, GET /stats\n"
GENERATED = {
    "type": "object",
    "required": ["generated_text"],
    "properties": {"generated_text": {"type": "string"}},
}
OPERATIONS = [
    Operation(
        "post", "/generate", "complete a prompt, as TGI does", "tgi", body=GenerateRequest, example=SENT,
        answer=GENERATED, generates=True, tgi=True,
    ),
    Operation(
        "post", "/generate_stream", "complete a prompt in events, one for each token", "tgi", body=StreamRequest,
        example=SENT, media="text/event-stream", answer={"type": "string"}, generates=True, tgi=True,
    ),
    Operation(
        "post", "/", "as /generate if the body has inputs (the answer is a list of one), else a greeting", "tgi",
        media="text/plain", answer={"type": "string"}, generates=True, tgi=True,
    ),
    Operation("get", "/info", "what serves, and how much it takes", "tgi", answer={"type": "object"}, errors=(503,)),
]  # fmt: skip


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("tgi", __name__)

    @routes.post("/generate")
    def generate() -> Response:
        return _answer(service, body.take(request, EXAMPLE), GenerateRequest, False)

    @routes.post("/generate_stream")
    def generate_stream() -> Response:
        return _answer(service, body.take(request, EXAMPLE), StreamRequest, True)

    @routes.post("/")
    def compatible() -> Response:
        g.tgi = True
        try:
            fields = body.parse(body.read(request), EXAMPLE)
        except ApiError as error:
            if error.status != 400:
                raise
            fields = {}
        if "inputs" not in fields:
            return Response(GREETING, mimetype="text/plain")
        return _answer(service, fields, CompatRequest, None)

    @routes.get("/info")
    def info() -> Response:
        return jsonify(information(service, generation.ready_engine(service)))

    return routes


def _answer(
    service: Service, fields: dict[str, Any], schema: type[GenerateRequest], streams: bool | None
) -> Response:
    """Answer a request that streams or not, or for None says so itself."""
    began = time.perf_counter()
    engine = generation.ready_engine(service)
    given = fields.get("parameters")
    harmless = (
        body.refuse_unsupported(given, UNSUPPORTED_PARAMETERS) if isinstance(given, dict) else []
    )
    asked, ignored = body.validate(schema, fields)
    in_list = streams is None
    if isinstance(asked, CompatRequest):
        streams = asked.stream
    ignored = [
        n for n in ignored if n.removeprefix("parameters.") not in harmless and n != "stream"
    ]
    check(asked.parameters, bool(streams))
    admission.take_more(service, ((asked.parameters and asked.parameters.best_of) or 1) - 1)
    job = generation.start(
        service, engine, ask_of(engine, asked, bool(streams)), streams=bool(streams)
    )
    writer = Writer(engine, job, asked, began)
    reply = writer.stream() if streams else writer.whole(in_list)
    return body.name_ignored(reply, ignored)


def samples(p: GenerateParameters | None) -> bool:
    """Whether tokens are drawn: by default without parameters, else if one of them means it."""
    if p is None or p.do_sample:
        return True
    return any(v is not None for v in (p.temperature, p.top_k, p.top_p, p.typical_p))


def check(p: GenerateParameters | None, streams: bool) -> None:
    """Raise ApiError for parameters that do not go together."""
    if p is None:
        return
    if streams and p.decoder_input_details:
        raise ApiError(
            "decoder_input_details is true in a stream, which has no place for them. Leave it out, or use /generate",
            param="decoder_input_details",
        )
    if p.best_of is None or p.best_of == 1:
        return
    for wrong, reason, remedy in (
        (streams, "a stream cannot choose among answers", "Leave it out, or use /generate"),
        (
            not samples(p),
            "greedy answers are all the same",
            "Send do_sample: true, or leave it out",
        ),
        (p.seed is not None, "a seed makes one answer", "Leave out seed or best_of"),
    ):
        if wrong:
            raise ApiError(f"best_of is {p.best_of}, but {reason}. {remedy}", param="best_of")


def ask_of(engine: Engine, asked: GenerateRequest, streams: bool) -> Ask:
    p = asked.parameters or GenerateParameters()
    heat = (1.0 if p.temperature is None else p.temperature) if samples(asked.parameters) else 0.0
    best_of = p.best_of or 1
    options: dict[str, Any] = {
        "temperature": heat,
        "top_k": p.top_k or 0,
        "top_p": p.top_p or 1.0,
        "typical_p": p.typical_p or 1.0,
        "repetition_penalty": p.repetition_penalty or 1.0,
        "frequency_penalty": p.frequency_penalty or 0.0,
        "stops": p.stop or p.stop_sequences or [],
        "ignore_eos": False,
        "keep_stop": True,
        "hide_special": True,
    }
    if streams or p.details or p.decoder_input_details or best_of > 1:
        options["logprobs"] = p.top_n_tokens or 0
    if p.decoder_input_details:
        options |= {"scores_prompt": True, "prompt_logprobs": True}
    ids = generation.encode(
        engine, asked.inputs, special=engine.special_end, keep=p.truncate, param="inputs"
    )
    return Ask(
        [Prompt(asked.inputs, ids)], p.max_new_tokens, "max_new_tokens", options,
        best_of=best_of, seed=p.seed,
    )  # fmt: skip


class Writer:
    """Writes the answer to one request, whole or one event for each token."""

    def __init__(self, engine: Engine, job: Job, asked: GenerateRequest, began: float) -> None:
        self.tokenizer = engine.tokenizer
        self.device = engine.device
        self.job = job
        self.inputs = asked.inputs
        self.parameters = asked.parameters or GenerateParameters()
        self.sampled = samples(asked.parameters)
        self.began = began
        self._pieces = Pieces(self.tokenizer)

    def whole(self, in_list: bool) -> Response:
        self.job.wait()
        order = range(len(self.job.inferences))
        ranked = sorted(
            order, key=lambda i: generation.mean_score(self.job.inferences[i]), reverse=True
        )
        best, *others = ranked if len(ranked) > 1 else order
        result: dict[str, Any] = {"generated_text": self._text(self.job.inferences[best])}
        if self.parameters.details or self.parameters.decoder_input_details:
            result["details"] = self._details(best)
            if others:
                result["details"]["best_of_sequences"] = [
                    {"generated_text": self._text(self.job.inferences[i]), **self._details(i)}
                    for i in others
                ]
        response = jsonify([result] if in_list else result)
        response.headers.update(self._headers(self.job.inferences[best]))
        return response

    def _text(self, inference: Inference) -> str:
        return (self.inputs if self.parameters.return_full_text else "") + inference.answer

    def _seed(self, index: int) -> int | None:
        return self.job.seeds[index] if self.sampled else None

    def _details(self, index: int) -> dict[str, Any]:
        inference = self.job.inferences[index]
        details = inference.details
        result = {
            "finish_reason": finish_reason(inference),
            "generated_tokens": len(inference.output_ids),
            "seed": self._seed(index),
            "prefill": self._prefill(inference) if self.parameters.decoder_input_details else [],
            "tokens": [
                self._token(token, text, detail.logprob)
                for token, text, detail in zip(
                    inference.output_ids, self._texts(inference), details
                )
            ],
        }
        if self.parameters.top_n_tokens:
            result["top_tokens"] = [self._top(detail) for detail in details]
        return result

    def _texts(self, inference: Inference) -> list[str]:
        """Return what each token adds; the last one whatever is left of the answer."""
        pieces, ids = Pieces(self.tokenizer), inference.output_ids
        texts = ["" if self._is_special(token) else pieces.add(token) for token in ids]
        last = max((i for i, token in enumerate(ids) if not self._is_special(token)), default=None)
        if last is not None:
            texts[last] = inference.answer[len("".join(texts[:last])) :]
        return texts

    def _prefill(self, inference: Inference) -> list[dict[str, Any]]:
        pieces, seq = Pieces(self.tokenizer), inference.sequence
        return [
            {"id": token, "text": pieces.add(token), "logprob": detail and detail.logprob}
            for token, detail in prompt_scores(seq.prompt_ids, seq.prompt_details)
        ]

    def _is_special(self, token: int) -> bool:
        return token == self.tokenizer.eot_id

    def _token(self, token: int, text: str, logprob: float) -> dict[str, Any]:
        special = self._is_special(token)
        text = self.tokenizer.decode([token]) if special else text
        return {"id": token, "text": text, "logprob": logprob, "special": special}

    def _top(self, detail: Any) -> list[dict[str, Any]]:
        return [self._token(id, self.tokenizer.decode([id]), value) for id, value in detail.top]

    def _headers(self, inference: Inference) -> dict[str, str]:
        """Return TGI's response headers; times in whole milliseconds, as there."""
        times, tokens = generation.timings(inference), len(inference.output_ids)
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
        follower = Follower(0, self.job.inferences[0], scored=False, every_token=True)
        response = streaming.respond(
            self.job, [follower], self._events, lambda: b"", space=b"", tokens_together=None
        )
        response.headers["x-compute-type"] = self.device
        response.headers["x-compute-characters"] = str(len(self.inputs))
        return response

    def _events(self, growth: Growth) -> bytes:
        """Return an event for each new token; together they say `growth.text`."""
        seq = self.job.inferences[0].sequence
        events, left = [], growth.text
        for at in range(growth.start, growth.stop):
            token, detail = seq.output_ids[at], seq.details[at]
            text = "" if self._is_special(token) else self._pieces.add(token)
            if growth.ended and all(map(self._is_special, seq.output_ids[at + 1 : growth.stop])):
                text = left
            left = left[len(text) :]
            one: dict[str, Any] = {
                "index": at + 1,
                "token": self._token(token, text, detail.logprob),
                "generated_text": None,
                "details": None,
            }
            if self.parameters.top_n_tokens:
                one["top_tokens"] = self._top(detail)
            events.append(one)
        if growth.ended and events:
            events[-1] |= self._ending(growth)
        return b"".join(streaming.event(one, b"") for one in events)

    def _ending(self, growth: Growth) -> dict[str, Any]:
        inference = self.job.inferences[0]
        details = {
            "finish_reason": finish_reason(inference),
            "generated_tokens": growth.stop,
            "seed": self._seed(0),
            "input_length": len(inference.sequence.prompt_ids),
        }
        return {"generated_text": self._text(inference), "details": details}


def finish_reason(inference: Inference) -> str:
    """Return TGI's name for how an answer ended."""
    if inference.finish_reason != "stop":
        return "length"
    return "eos_token" if inference.stop_reason is None else "stop_sequence"


def information(service: Service, engine: Engine) -> dict[str, Any]:
    """Return the body of /info: TGI's fields, then ours."""
    manager, pages = engine.manager, engine.manager.pages
    fits = {} if pages is None else {
        str(n): pages.total // pages.pages_for(n) for n in (128, 256, 512, 1024)
    }  # fmt: skip
    return {
        "model_id": engine.served_name,
        "model_sha": engine.facts.get("revision"),
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": service.config.max_open_requests,
        "max_best_of": 4,
        "max_stop_sequences": 4,
        "max_input_tokens": engine.context - 1,
        "max_total_tokens": engine.context,
        "validation_workers": 1,
        "max_client_batch_size": 1,
        "router": "effective-batching",
        "version": settings.VERSION,
        "sha": None,
        "docker_label": None,
        "policy": engine.policy,
        "policy_params": engine.facts.get(
            "policy_params", {"max_batch_size": manager.max_batch_size}
        ),
        "max_batch_size": manager.max_batch_size,
        "device": engine.device,
        "dtype": engine.dtype,
        "attention_backend": engine.facts.get("attention"),
        "kv_pages": None if pages is None else pages.total,
        "page_size": engine.page_size,
        "max_concurrent_sequences": fits,
    }
