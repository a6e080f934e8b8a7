"""How OpenAI's dialect writes the answer to a completions request, whole or in chunks, and what it used.

It must not know how a request is checked or computed.
"""

from __future__ import annotations

import time
from itertools import chain
from typing import Any

from flask import Response, g, jsonify

from api import generation, streaming
from api.dialects.logprobs import Logprobs, Scored, join, prompt_logprobs, prompt_scores
from api.generation import Generation
from api.http import parts
from api.schemas import CompletionRequest
from api.schemas.openai import Sampled
from api.service import Engine
from api.streaming import Delta, StreamReader
from observe.feed import dumps
from serving.inference import Inference

MOST_SCORED, MOST_TOKENS = 2048, 1 << 15  # of an answer that is written at once


def usage(job: Generation, chosen: list[Inference]) -> dict[str, Any]:
    """Return what a request used: each prompt once, and the tokens of all choices."""
    firsts = [group[0].sequence for group in job.groups]
    prompt = sum(len(seq.prompt_ids) for seq in firsts)
    completion = sum(len(inference.output_ids) for inference in chosen)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(seq.cached for seq in firsts)},
    }


def usage_so_far(job: Generation, growth: Delta) -> dict[str, int]:
    """Return what one choice has used up to the end of a chunk, as vLLM counts: its own prompt, its own tokens."""
    prompt = len(job.inferences[growth.index].sequence.prompt_ids)
    return {"prompt_tokens": prompt, "completion_tokens": growth.stop, "total_tokens": prompt + growth.stop}


def choose(job: Generation) -> list[Inference]:
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

    def __init__(self, engine: Engine, job: Generation, asked: CompletionRequest) -> None:
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

    @property
    def is_large(self) -> bool:
        """Whether the answer may have thousands of tokens with their scores, or many prompts."""
        asked, sequences = self.asked, [i.sequence for i in self.job.inferences]
        tokens = sum(seq.max_tokens for seq in sequences)
        if asked.echo or asked.return_token_ids or asked.prompt_logprobs is not None:
            tokens += sum(len(seq.prompt_ids) for seq in sequences)
        is_scored = asked.logprobs is not None or asked.prompt_logprobs is not None
        return tokens > (MOST_SCORED if is_scored else MOST_TOKENS)

    def whole(self) -> Response:
        self.job.wait()
        chosen = choose(self.job)
        choices = (self._choice(i, inference) for i, inference in enumerate(chosen))
        head, total = {**self.head, "system_fingerprint": None}, usage(self.job, chosen)
        if not self.is_large:
            return jsonify({**head, "choices": list(choices), "usage": total})
        start, end = dumps(head)[:-1] + ',"choices":[', f'],"usage":{dumps(total)}}}\n'
        return parts.response(chain([start], parts.listed(choices, 1), [end]), is_large=True)

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
        if self.asked.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(inference, self.asked.prompt_logprobs)
        if self.asked.return_token_ids:
            choice["prompt_token_ids"] = inference.sequence.prompt_ids
            choice["token_ids"] = inference.output_ids
        return choice

    def _prompt_logprobs(self, inference: Inference, most: int) -> list[Any]:
        seq = inference.sequence
        return prompt_logprobs(self.engine.tokenizer, seq.prompt_ids, seq.prompt_details, most)

    def _scores(self, index: int, inference: Inference, start: int, stop: int) -> dict[str, Any]:
        """Return the logprobs object of tokens start..stop, with the prompt's before the first if it is echoed."""
        seq, most = inference.sequence, self.asked.logprobs or 0
        first = index not in self._logprobs
        if first:
            offset = len(inference.prompt)
            self._logprobs[index] = Logprobs(self.engine.tokenizer, offset, most, self._endings(inference))
        scored = [Scored(*pair) for pair in zip(seq.output_ids[start:stop], seq.details[start:stop])]
        written = self._logprobs[index].write(scored)
        if first and self.asked.echo:
            before = Logprobs(self.engine.tokenizer, 0, most)
            written = join(before.write(prompt_scores(seq.prompt_ids, seq.prompt_details)), written)
        return written

    def _endings(self, inference: Inference) -> list[int]:
        """Return the ids that logprobs leave out: end-of-text, unless it is shown."""
        return [] if self.asked.ignore_eos and not self._hidden else [self.engine.tokenizer.eot_id]

    def stream(self) -> Response:
        scored = self.asked.logprobs is not None or self.asked.return_token_ids
        followers = [
            StreamReader(i, inference, scored=scored, every_token=False)
            for i, inference in enumerate(self.job.inferences)
        ]
        return streaming.respond(
            self.job, followers, self._chunk, self._end, tokens_together=self.asked.stream_interval
        )

    def _chunk(self, growth: Delta) -> bytes:
        """Return one choice's event; put together by hand, since there is one for each step of each stream."""
        inference = self.job.inferences[growth.index]
        text, logprobs, more = growth.text, "null", ""
        if self.asked.logprobs is not None:
            logprobs = dumps(self._scores(growth.index, inference, growth.start, growth.stop))
        if growth.index not in self._begun:
            self._begun.add(growth.index)
            if self.asked.echo:
                text = inference.prompt + text
            if self.asked.prompt_logprobs is not None:
                scores = self._prompt_logprobs(inference, self.asked.prompt_logprobs)
                more = f',"prompt_logprobs":{dumps(scores)}'
            if self.asked.return_token_ids:
                more += f',"prompt_token_ids":{dumps(inference.sequence.prompt_ids)}'
        if self.asked.return_token_ids:
            ids = inference.sequence.output_ids[growth.start : growth.stop]
            more += f',"token_ids":{dumps(ids)}'
        reason, stop_reason = "null", "null"
        if growth.ended:
            reason, stop_reason = dumps(inference.finish_reason), dumps(inference.stop_reason)
        return (
            f'data: {self._start}{growth.index},"text":{dumps(text)},"logprobs":{logprobs},'
            f'"finish_reason":{reason},"stop_reason":{stop_reason}{more}}}]{self._usage(growth)}}}\n\n'
        ).encode()

    def _usage(self, growth: Delta) -> str:
        if self._usage_always:
            return f',"usage":{dumps(usage_so_far(self.job, growth))}'
        return ',"usage":null' if self._usage_last else ""

    def _end(self) -> bytes:
        if not self._usage_last:
            return streaming.DONE
        total = {**self.head, "choices": [], "usage": usage(self.job, self.job.inferences)}
        return streaming.event(total) + streaming.DONE
