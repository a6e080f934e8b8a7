"""How OpenAI's dialect writes the answer to a request, whole or in chunks, and its token usage.

This module must not know how a request is checked or computed.
"""

from __future__ import annotations

import time
from itertools import chain
from typing import Any, Generic, TypeVar

from flask import Response, g, jsonify

from api import streaming
from api.dialects.logprobs import Logprobs, Scored, join, prompt_logprobs, prompt_scores
from api.generation import Generation, total_score
from api.http import parts
from api.schemas.openai import CompletionRequest, Sampled
from api.service import Engine
from api.streaming import Delta, StreamReader
from observe.feed import data, dumps
from serving.inference import Inference

MOST_SCORED, MOST_TOKENS = 2048, 1 << 15  # of an answer that is written at once
Params = TypeVar("Params", bound=Sampled)


def usage(generation: Generation, chosen: list[Inference]) -> dict[str, Any]:
    """Return the token usage of a request: each prompt once, and the tokens of all choices."""
    firsts = [group[0].sequence for group in generation.groups]
    prompt = sum(len(seq.prompt_ids) for seq in firsts)
    completion = sum(len(inference.output_ids) for inference in chosen)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(seq.cached for seq in firsts)},
    }


def choose(generation: Generation) -> list[Inference]:
    """Return the `n` best answers to each prompt, by the sum of their log probabilities."""
    request = generation.request
    if request.best_of == request.n:
        return generation.inferences
    ranked = [sorted(group, key=total_score, reverse=True) for group in generation.groups]
    return [inference for group in ranked for inference in group[: request.n]]


class Writer(Generic[Params]):
    """Writes the answer to one request, whole or in chunks; a subclass knows the form of a choice."""

    kind = chunk_kind = prefix = ""
    is_large = False  # whether writing it at once would hold the interpreter for long

    def __init__(self, engine: Engine, generation: Generation, params: Params) -> None:
        self.engine = engine
        self.generation = generation
        self.params = params
        self.head = {
            "id": f"{self.prefix}{g.request_id}",
            "object": self.chunk_kind if params.stream else self.kind,
            "created": int(time.time()),
            "model": params.model or engine.served_name,
        }
        options = params.stream_options
        self.usage_last = options is not None and options.include_usage
        self.usage_always = self.usage_last and options is not None and options.continuous_usage_stats
        self._begun: set[int] = set()
        self._hidden = engine.tokenizer.special_ids if params.skip_special_tokens else frozenset()

    def whole(self) -> Response:
        """Wait for the answer and return it in one piece."""
        self.generation.wait()
        chosen = choose(self.generation)
        choices = (self._choice(i, inference) for i, inference in enumerate(chosen))
        head, total = {**self.head, "system_fingerprint": None}, usage(self.generation, chosen)
        if not self.is_large:
            return jsonify({**head, "choices": list(choices), "usage": total})
        start, end = dumps(head)[:-1] + ',"choices":[', f'],"usage":{dumps(total)}}}\n'
        return parts.response(chain([start], parts.items(choices, 1), [end]), is_large=True)

    def _choice(self, index: int, inference: Inference) -> dict[str, Any]:
        raise NotImplementedError

    def _is_large(self, is_scored: bool, with_prompts: bool) -> bool:
        """Return whether the answer may have thousands of tokens with their scores, or many prompts."""
        sequences = [inference.sequence for inference in self.generation.inferences]
        tokens = sum(seq.max_tokens + len(seq.prompt_ids) * with_prompts for seq in sequences)
        return tokens > (MOST_SCORED if is_scored else MOST_TOKENS)

    def stream(self) -> Response:
        """Return the answer as a stream."""
        readers = [
            StreamReader(i, inference, scored=self._needs_tokens())
            for i, inference in enumerate(self.generation.inferences)
        ]
        interval = self.params.stream_interval
        return streaming.respond(self.generation, readers, self._chunk, self._end, tokens_together=interval)

    def is_first(self, choice: int) -> bool:
        """Return whether this is the first chunk of a choice."""
        if choice in self._begun:
            return False
        self._begun.add(choice)
        return True

    def usage_so_far(self, delta: Delta) -> dict[str, int]:
        """Return the usage of one choice up to the end of a chunk, as in vLLM: its own prompt and its own tokens."""
        prompt = len(self.generation.inferences[delta.choice].sequence.prompt_ids)
        return {"prompt_tokens": prompt, "completion_tokens": delta.stop, "total_tokens": prompt + delta.stop}

    def _needs_tokens(self) -> bool:
        """Return whether a chunk lists the tokens of its text."""
        return self.params.return_token_ids

    def _scored(self, inference: Inference, start: int, stop: int) -> list[Scored]:
        seq = inference.sequence
        return [Scored(*pair) for pair in zip(seq.output_ids[start:stop], seq.details[start:stop])]

    def _chunk(self, delta: Delta) -> bytes:
        raise NotImplementedError

    def _end(self) -> bytes:
        if not self.usage_last:
            return streaming.DONE
        total = {**self.head, "choices": [], "usage": usage(self.generation, self.generation.inferences)}
        return data(total) + streaming.DONE


class CompletionWriter(Writer[CompletionRequest]):
    """Writes the answer to a completions request, whole or in chunks."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"

    def __init__(self, engine: Engine, generation: Generation, params: CompletionRequest) -> None:
        super().__init__(engine, generation, params)
        self._start = dumps(self.head)[:-1] + ',"choices":[{"index":'
        self._logprobs: dict[int, Logprobs] = {}
        is_scored = params.logprobs is not None or params.prompt_logprobs is not None
        with_prompts = params.echo or params.return_token_ids or params.prompt_logprobs is not None
        self.is_large = self._is_large(is_scored, with_prompts)

    def _choice(self, index: int, inference: Inference) -> dict[str, Any]:
        text, logprobs = inference.answer, None
        if self.params.logprobs is not None:
            logprobs = self._scores(index, inference, 0, len(inference.output_ids), len(text))
        if self.params.echo:
            text = inference.prompt + text
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": inference.finish_reason,
            "stop_reason": inference.stop_reason,
        }
        if self.params.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(inference, self.params.prompt_logprobs)
        if self.params.return_token_ids:
            choice["prompt_token_ids"] = inference.sequence.prompt_ids
            choice["token_ids"] = inference.output_ids
        return choice

    def _prompt_logprobs(self, inference: Inference, most: int) -> list[Any]:
        seq = inference.sequence
        return prompt_logprobs(self.engine.tokenizer, seq.prompt_ids, seq.prompt_details, most)

    def _scores(self, index: int, inference: Inference, start: int, stop: int, end: int | None) -> dict[str, Any]:
        """Return the logprobs object of tokens start..stop; the first of an echoed answer begins with the prompt's.

        `end` is the length of the answer in characters, None before its end.
        """
        tokenizer, most, begin = self.engine.tokenizer, self.params.logprobs or 0, len(inference.prompt)
        first = index not in self._logprobs
        if first:
            self._logprobs[index] = Logprobs(tokenizer, begin, most, self._hidden)
        end = None if end is None else begin + end
        scores = self._logprobs[index].write(self._scored(inference, start, stop), end)
        if first and self.params.echo:
            seq = inference.sequence
            # What only begins a prompt, such as <s>, is not in the text that was sent.
            added = len(tokenizer.decode(seq.prompt_ids)) - begin
            before = Logprobs(tokenizer, min(0, -added), most)
            scores = join(before.write(prompt_scores(seq.prompt_ids, seq.prompt_details), begin), scores)
        return scores

    def _needs_tokens(self) -> bool:
        return self.params.logprobs is not None or self.params.return_token_ids

    def _chunk(self, delta: Delta) -> bytes:
        """Return the event of one choice, formatted by hand because there is one for each step of each stream."""
        inference = self.generation.inferences[delta.choice]
        text, logprobs, more = delta.text, "null", ""
        if self.params.logprobs is not None:
            end = len(inference.answer) if delta.ended else None
            logprobs = dumps(self._scores(delta.choice, inference, delta.start, delta.stop, end))
        if self.is_first(delta.choice):
            if self.params.echo:
                text = inference.prompt + text
            if self.params.prompt_logprobs is not None:
                scores = self._prompt_logprobs(inference, self.params.prompt_logprobs)
                more = f',"prompt_logprobs":{dumps(scores)}'
            if self.params.return_token_ids:
                more += f',"prompt_token_ids":{dumps(inference.sequence.prompt_ids)}'
        if self.params.return_token_ids:
            ids = inference.sequence.output_ids[delta.start : delta.stop]
            more += f',"token_ids":{dumps(ids)}'
        reason, stop_reason = "null", "null"
        if delta.ended:
            reason, stop_reason = dumps(inference.finish_reason), dumps(inference.stop_reason)
        return (
            f'data: {self._start}{delta.choice},"text":{dumps(text)},"logprobs":{logprobs},'
            f'"finish_reason":{reason},"stop_reason":{stop_reason}{more}}}]{self._usage(delta)}}}\n\n'
        ).encode()

    def _usage(self, delta: Delta) -> str:
        if self.usage_always:
            return f',"usage":{dumps(self.usage_so_far(delta))}'
        return ',"usage":null' if self.usage_last else ""
