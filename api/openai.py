"""OpenAI's dialect: completions, with vLLM's extras, and the list of the one model."""

from __future__ import annotations

import time
from typing import Any

from flask import Blueprint, Response, g, jsonify, request

from api import admission, body, generation, streaming
from api.errors import ApiError
from api.generation import Ask, Job, Prompt
from api.logprobs import Logprobs, Scored, join, prompt_scores
from api.openapi import Operation
from api.schemas import CompletionRequest
from api.schemas.openai import UNSUPPORTED_COMPLETION, Sampled
from api.service import Engine, Service
from api.streaming import Follower, Growth, dumps
from inference import Inference

EXAMPLE = '{"prompt": "ROMEO:", "max_tokens": 40}'
USAGE = {"type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens"]}
OPERATIONS = [
    Operation(
        "post", "/v1/completions", "complete one or several prompts", "openai", body=CompletionRequest,
        example={"prompt": "ROMEO:", "max_tokens": 8}, generates=True, streams=True,
        answer={
            "type": "object", "required": ["id", "object", "created", "model", "choices", "usage"],
            "properties": {"object": {"const": "text_completion"}, "choices": {"type": "array"}, "usage": USAGE},
        },
    ),
    Operation(
        "get", "/v1/models", "the model that is served", "openai", errors=(503,),
        answer={"type": "object", "required": ["object", "data"], "properties": {"data": {"type": "array"}}},
    ),
    Operation(
        "get", "/v1/models/{model}", "the model that is served, if it is this one", "openai", errors=(404, 503),
        answer={"type": "object", "required": ["id", "object", "created", "owned_by"]},
    ),
]  # fmt: skip


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("openai", __name__)

    @routes.post("/v1/completions")
    def completions() -> Response:
        engine = generation.ready_engine(service)
        fields = body.take(request, EXAMPLE)
        harmless = body.refuse_unsupported(fields, UNSUPPORTED_COMPLETION)
        asked, ignored = body.validate(CompletionRequest, fields)
        generation.check_model(engine, asked.model)
        check_sampled(service, asked)
        check_completion(asked)
        admission.take_more(service, len(asked.prompt) * (asked.best_of or asked.n) - 1)
        job = generation.start(service, engine, completion_ask(engine, asked), streams=asked.stream)
        writer = CompletionWriter(engine, job, asked)
        reply = writer.stream() if asked.stream else writer.whole()
        names = [n for n in ignored if n not in harmless] + ignored_here(asked)
        return body.name_ignored(reply, names)

    @routes.get("/v1/models")
    def models() -> Response:
        return jsonify(object="list", data=[model_card(generation.ready_engine(service))])

    @routes.get("/v1/models/<path:model>")
    def model(model: str) -> Response:
        engine = generation.ready_engine(service)
        generation.check_model(engine, model)
        return jsonify(model_card(engine))

    return routes


def model_card(engine: Engine) -> dict[str, Any]:
    return {
        "id": engine.served_name,
        "object": "model",
        "created": int(engine.loaded_at),
        "owned_by": "effective-batching",
        "root": engine.served_name,
        "parent": None,
        "max_model_len": engine.context,
    }


def ignored_here(asked: Sampled) -> list[str]:
    """Return the known fields that have no effect here."""
    return ["priority"] if "priority" in asked.model_fields_set else []


def check_sampled(service: Service, asked: Sampled) -> None:
    """Raise ApiError for fields that do not go together; take the id that the body asks for."""
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(
            'stream_options is there without stream. Send "stream": true, or leave it out',
            param="stream_options",
        )
    if asked.request_id is not None and "X-Request-Id" not in request.headers:
        g.request_id = asked.request_id
        service.visits.rename(g.visit, asked.request_id)


def check_completion(asked: CompletionRequest) -> None:
    if asked.best_of is not None and asked.best_of < asked.n:
        raise ApiError(
            f"best_of is {asked.best_of} and n is {asked.n}, best_of must be at least n. Raise best_of",
            param="best_of",
        )
    if asked.stream and asked.best_of is not None and asked.best_of > asked.n:
        raise ApiError(
            f"best_of is {asked.best_of} and n is {asked.n}; a stream cannot choose among answers. Leave "
            "best_of out, or do not stream", param="best_of",
        )  # fmt: skip
    if asked.max_tokens == 0 and not asked.echo:
        raise ApiError(
            "max_tokens is 0, must be at least 1 without echo. Ask for a token, or send echo: true",
            param="max_tokens",
        )
    if asked.min_tokens > asked.max_tokens:
        raise too_many_at_least(asked.min_tokens, asked.max_tokens)


def too_many_at_least(fewest: int, most: int) -> ApiError:
    return ApiError(
        f"min_tokens is {str(fewest)[:40]} and max_tokens is {str(most)[:40]}, min_tokens must be at most "
        "max_tokens. Lower min_tokens", param="min_tokens",
    )  # fmt: skip


def options_of(engine: Engine, asked: Sampled) -> dict[str, Any]:
    """Return the options of `make_inference` that the dialect's common fields mean."""
    generation.check_ids(engine, asked.stop_token_ids, "stop_token_ids")
    generation.check_ids(engine, list(asked.logit_bias), "logit_bias")
    return {
        "temperature": asked.temperature,
        "top_k": max(asked.top_k, 0),
        "top_p": asked.top_p,
        "min_p": asked.min_p,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "repetition_penalty": asked.repetition_penalty,
        "logit_bias": tuple(asked.logit_bias.items()),
        "stops": asked.stop,
        "stop_ids": asked.stop_token_ids,
        "ignore_eos": asked.ignore_eos,
        "min_tokens": asked.min_tokens,
        "keep_stop": asked.include_stop_str_in_output,
        "hide_special": asked.skip_special_tokens,
        "client": asked.user,
        "priority": asked.priority,
    }


def completion_ask(engine: Engine, asked: CompletionRequest) -> Ask:
    options = options_of(engine, asked)
    best_of = asked.best_of or asked.n
    if asked.logprobs is not None or best_of > asked.n:
        options["logprobs"] = asked.logprobs or 0
    if asked.echo and (asked.logprobs is not None or asked.max_tokens == 0):
        options["scores_prompt"] = True
        options["prompt_logprobs"] = asked.logprobs is not None
    return Ask(
        prompts_of(engine, asked), asked.max_tokens, "max_tokens", options,
        n=asked.n, best_of=best_of, seed=asked.seed, timeout_s=asked.timeout_s,
    )  # fmt: skip


def prompts_of(engine: Engine, asked: CompletionRequest) -> list[Prompt]:
    """Return the prompts as text and ids, cut to their last tokens if that is asked for."""
    keep = asked.truncate_prompt_tokens
    prompts = []
    for given in asked.prompt:
        if isinstance(given, str):
            ids = generation.encode(engine, given, special=engine.special_end, keep=keep)
            text = given if keep is None else engine.tokenizer.decode(ids)
        else:
            generation.check_ids(engine, given, "prompt")
            ids = given if keep is None else given[-keep:]
            text = engine.tokenizer.decode(ids)
        prompts.append(Prompt(text, ids))
    return prompts


def usage(job: Job, chosen: list[Inference], ready: bool = False) -> dict[str, Any]:
    """Return what a request used: each prompt once, and the tokens of all choices."""
    firsts = [group[0].sequence for group in job.groups]
    prompt = sum(len(seq.prompt_ids) for seq in firsts)
    completion = sum(i.ready if ready and not i.is_finished else len(i.output_ids) for i in chosen)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(seq.cached for seq in firsts)},
    }


def choose(job: Job) -> list[Inference]:
    """Return the `n` best answers to each prompt, by the sum of their log probabilities."""
    if job.ask.best_of == job.ask.n:
        return job.inferences
    ranked = [sorted(group, key=generation.total_score, reverse=True) for group in job.groups]
    return [inference for group in ranked for inference in group[: job.ask.n]]


def stream_options(asked: Sampled) -> tuple[bool, bool]:
    """Return whether a stream ends with its usage, and whether each chunk has it."""
    options = asked.stream_options
    if options is None:
        return False, False
    return options.include_usage, options.include_usage and options.continuous_usage_stats


class CompletionWriter:
    """Writes the answer to one completions request, whole or in chunks."""

    def __init__(self, engine: Engine, job: Job, asked: CompletionRequest) -> None:
        self.engine = engine
        self.job = job
        self.asked = asked
        self.head = {
            "id": f"cmpl-{g.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": engine.served_name,
        }
        self._hidden = [engine.tokenizer.eot_id] if asked.skip_special_tokens else []
        self._usage_last, self._usage_always = stream_options(asked)
        self._start = dumps(self.head)[:-1] + ',"choices":[{"index":'
        self._logprobs: dict[int, Logprobs] = {}
        self._begun: set[int] = set()

    def whole(self) -> Response:
        self.job.wait()
        chosen = choose(self.job)
        choices = [self._choice(i, inference) for i, inference in enumerate(chosen)]
        return jsonify(
            {**self.head, "system_fingerprint": None, "choices": choices, "usage": usage(self.job, chosen)}
        )  # fmt: skip

    def _choice(self, index: int, inference: Inference) -> dict[str, Any]:
        text, logprobs = inference.answer, None
        if self.asked.logprobs is not None:
            logprobs = self._scores(index, inference, 0, len(inference.output_ids))
        if self.asked.echo:
            text = inference.prompt + text
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": inference.finish_reason,
            "stop_reason": inference.stop_reason,
        }
        if self.asked.return_token_ids:
            choice["prompt_token_ids"] = inference.sequence.prompt_ids
            choice["token_ids"] = inference.output_ids
        return choice

    def _scores(self, index: int, inference: Inference, start: int, stop: int) -> dict[str, Any]:
        """Return the logprobs object of tokens start..stop, with the prompt's before the first if it is echoed."""
        seq = inference.sequence
        first = index not in self._logprobs
        if first:
            offset = len(inference.prompt)
            self._logprobs[index] = Logprobs(
                self.engine.tokenizer, offset, self._endings(inference)
            )
        scored = [
            Scored(*pair) for pair in zip(seq.output_ids[start:stop], seq.details[start:stop])
        ]
        written = self._logprobs[index].write(scored)
        if first and self.asked.echo:
            before = Logprobs(self.engine.tokenizer, 0)
            written = join(before.write(prompt_scores(seq.prompt_ids, seq.prompt_details)), written)
        return written

    def _endings(self, inference: Inference) -> list[int]:
        """Return the ids that logprobs leave out: end-of-text, unless it is shown."""
        return [] if self.asked.ignore_eos and not self._hidden else [self.engine.tokenizer.eot_id]

    def stream(self) -> Response:
        scored = self.asked.logprobs is not None or self.asked.return_token_ids
        followers = [
            Follower(i, inference, scored=scored, every_token=False)
            for i, inference in enumerate(self.job.inferences)
        ]
        return streaming.respond(
            self.job, followers, self._chunk, self._end, tokens_together=self.asked.stream_interval
        )

    def _chunk(self, growth: Growth) -> bytes:
        """Return one choice's event; put together by hand, since there is one for each step of each stream."""
        inference = self.job.inferences[growth.index]
        text, logprobs, ids = growth.text, "null", ""
        if self.asked.logprobs is not None:
            logprobs = dumps(self._scores(growth.index, inference, growth.start, growth.stop))
        if growth.index not in self._begun:
            self._begun.add(growth.index)
            if self.asked.echo:
                text = inference.prompt + text
            if self.asked.return_token_ids:
                ids = f',"prompt_token_ids":{dumps(inference.sequence.prompt_ids)}'
        if self.asked.return_token_ids:
            ids += (
                f',"token_ids":{dumps(inference.sequence.output_ids[growth.start : growth.stop])}'
            )
        reason, stop_reason = "null", "null"
        if growth.ended:
            reason, stop_reason = dumps(inference.finish_reason), dumps(inference.stop_reason)
        return (
            f'data: {self._start}{growth.index},"text":{dumps(text)},"logprobs":{logprobs},'
            f'"finish_reason":{reason},"stop_reason":{stop_reason}{ids}}}]{self._usage()}}}\n\n'
        ).encode()

    def _usage(self) -> str:
        if self._usage_always:
            return f',"usage":{dumps(usage(self.job, self.job.inferences, ready=True))}'
        return ',"usage":null' if self._usage_last else ""

    def _end(self) -> bytes:
        if not self._usage_last:
            return b"data: [DONE]\n\n"
        total = {**self.head, "choices": [], "usage": usage(self.job, self.job.inferences)}
        return streaming.event(total) + b"data: [DONE]\n\n"
