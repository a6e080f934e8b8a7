"""How OpenAI's dialect writes the answer to a request, whole or in chunks, and its token usage.

This module must not know how a request is checked or computed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from flask import Response, current_app, g

from api import streaming
from api.dialects.logprobs import Logprobs, Scored, prompt_logprobs, prompt_scores
from api.generation import Generation, reply
from api.http import parts
from api.http.deferral import Deferred
from api.schemas.openai import CompletionRequest, Sampled
from api.service import LoadedEngine
from api.streaming import Delta
from observe.feed import dumps
from serving.inference import Inference

Params = TypeVar("Params", bound=Sampled)


def usage(generation: Generation) -> dict[str, Any]:
    """Return the token usage of a request: each prompt once, and the tokens of all choices."""
    firsts = [group[0].sequence for group in generation.groups]
    prompt = sum(len(seq.prompt_ids) for seq in firsts)
    completion = sum(len(inference.output_ids) for inference in generation.inferences)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(seq.cached for seq in firsts)},
    }


def scored_tokens(delta: Delta, inference: Inference) -> list[Scored]:
    """Return the tokens of a delta with their scores."""
    seq, new = inference.sequence, slice(delta.start, delta.stop)
    return [Scored(*pair) for pair in zip(seq.output_ids[new], seq.details[new])]


class Writer(Generic[Params]):
    """Writes the answer to one request, whole or in chunks; a subclass knows the form of a choice.

    A whole choice is written as a chunk in which everything is new.
    """

    kind = chunk_kind = prefix = ""

    def __init__(self, engine: LoadedEngine, generation: Generation, params: Params, *, scored: bool) -> None:
        self.engine = engine
        self.generation = generation
        self.params = params
        self._is_scored = scored
        # Small answers are in ASCII as those of all other routes.
        self._dumps = dumps if params.stream or generation.is_large else current_app.json.dumps
        head = {
            "id": f"{self.prefix}{g.request_id}",
            "object": self.chunk_kind if params.stream else self.kind,
            "created": int(time.time()),
            "model": params.model or engine.served_name,
        }
        if not params.stream:
            head["system_fingerprint"] = None
        self._start = self._dumps(head)[:-1] + ',"choices":['
        options = params.stream_options
        self._usage_last = options is not None and options.include_usage
        self._usage_always = self._usage_last and options is not None and options.continuous_usage_stats
        self._begun: set[int] = set()  # choices

    def reply(self, ignored: list[str]) -> Response | Deferred:
        """Return the answer, whole or as a stream; it names the ignored fields."""
        return reply(self.generation, ignored, lambda: parts.response(self._parts()), self.stream)

    def _parts(self) -> Iterator[str]:
        yield self._start
        for i, inference in enumerate(self.generation.inferences):
            choice = self._choice(Delta(i, inference.answer, 0, len(inference.output_ids), True), inference)
            yield f",{choice}" if i else choice
        yield f'],"usage":{self._dumps(usage(self.generation))}}}\n'

    def stream(self) -> Response:
        """Return the answer as a stream."""
        return streaming.respond(
            self.generation, self._chunk, self._end,
            scored=self._is_scored or self.params.return_token_ids, tokens_together=self.params.stream_interval,
        )  # fmt: skip

    def _chunk(self, delta: Delta, content: str | None = None) -> bytes:
        """Return the event of one choice; see `_choice`."""
        inference, usage = self.generation.inferences[delta.choice], ""
        if self._usage_always:  # as in vLLM: of this choice alone, up to the end of this chunk
            n = len(inference.sequence.prompt_ids)
            counts = {"prompt_tokens": n, "completion_tokens": delta.stop, "total_tokens": n + delta.stop}
            usage = f',"usage":{self._dumps(counts)}'
        elif self._usage_last:
            usage = ',"usage":null'
        return f"data: {self._start}{self._choice(delta, inference, content)}]{usage}}}\n\n".encode()

    def _choice(self, delta: Delta, inference: Inference, content: str | None = None) -> str:
        """Return what is new in a choice as JSON, formatted by hand: there is one for each step of each stream.

        `content` is the member that has its new text, unless it is that of the delta alone.
        """
        is_first = delta.choice not in self._begun
        self._begun.add(delta.choice)
        scores, reason, stop_reason = "null", "null", "null"
        if self._is_scored:
            scores = self._dumps(self._scores(delta, inference))
        if delta.ended:
            reason, stop_reason = self._dumps(self._reason(delta, inference)), self._dumps(inference.stop_reason)
        more = self._prompt(inference) if is_first else ""
        if self.params.return_token_ids:
            more += f',"token_ids":{self._dumps(inference.sequence.output_ids[delta.start : delta.stop])}'
        if content is None:
            content = self._content(delta.text, inference, is_first)
        return (
            f'{{"index":{delta.choice},{content},"logprobs":{scores},'
            f'"finish_reason":{reason},"stop_reason":{stop_reason}{more}}}'
        )

    def _content(self, text: str, inference: Inference, is_first: bool) -> str:
        """Return the member of a choice that has its new text; the first one shows the time of the first token."""
        raise NotImplementedError

    def _reason(self, delta: Delta, inference: Inference) -> str | None:
        """Return why a choice has ended."""
        return inference.finish_reason

    def _scores(self, delta: Delta, inference: Inference) -> dict[str, Any]:
        """Return the logprobs object of the new tokens."""
        raise NotImplementedError

    def _prompt(self, inference: Inference) -> str:
        """Return the members of a choice about its prompt, each after a comma."""
        return ""

    def _end(self) -> bytes:
        if not self._usage_last:
            return streaming.DONE
        total = self._dumps(usage(self.generation))
        return f'data: {self._start}],"usage":{total}}}\n\n'.encode() + streaming.DONE


class CompletionWriter(Writer[CompletionRequest]):
    """Writes the answer to a completions request, whole or in chunks."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"

    def __init__(self, engine: LoadedEngine, generation: Generation, params: CompletionRequest) -> None:
        super().__init__(engine, generation, params, scored=params.logprobs is not None)
        self._logprobs: dict[int, Logprobs] = {}  # by choice
        self._hidden = engine.tokenizer.special_ids if params.skip_special_tokens else frozenset()

    def _content(self, text: str, inference: Inference, is_first: bool) -> str:
        echo = inference.prompt if is_first and self.params.echo else ""
        return f'"text":{self._dumps(echo + text)}'

    def _prompt(self, inference: Inference) -> str:
        seq, members = inference.sequence, ""
        if self.params.prompt_logprobs is not None:
            most = self.params.prompt_logprobs
            scores = prompt_logprobs(self.engine.tokenizer, seq.prompt_ids, seq.prompt_details, most)
            members = f',"prompt_logprobs":{self._dumps(scores)}'
        if self.params.return_token_ids:
            members += f',"prompt_token_ids":{self._dumps(seq.prompt_ids)}'
        return members

    def _scores(self, delta: Delta, inference: Inference) -> dict[str, Any]:
        """Return the logprobs object of the new tokens; the first of an echoed answer begins with the prompt's."""
        tokenizer, most, begin = self.engine.tokenizer, self.params.logprobs or 0, len(inference.prompt)
        first = delta.choice not in self._logprobs
        if first:
            self._logprobs[delta.choice] = Logprobs(tokenizer, begin, most, self._hidden)
        end = begin + len(inference.answer) if delta.ended else None  # where the text ends
        scores = self._logprobs[delta.choice].write(scored_tokens(delta, inference), end)
        if first and self.params.echo:
            seq = inference.sequence
            # What only begins a prompt, such as <s>, is not in the text that was sent.
            added = len(tokenizer.decode(seq.prompt_ids)) - begin
            of_prompt = Logprobs(tokenizer, min(0, -added), most)
            before = of_prompt.write(prompt_scores(seq.prompt_ids, seq.prompt_details), begin)
            scores = {name: before[name] + after for name, after in scores.items()}
        return scores
