"""The dialects of requests: the bodies to send, and how answers and events are read.

`inference` is the original's, `openai` is `/v1/completions`, `tgi` is `/generate`. Chat messages always go to
`/v1/chat/completions`. Pure: this module must not know sockets or clocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..data import Planned
from .sse import read_json

APIS = ("inference", "openai", "tgi")
CHAT_PATH = "/v1/chat/completions"
MOST_TOKENS = 10_000_000  # of an answer; a greater number is not a count
# Fields of a chat's chunk that hold tokens.
SAID = ("content", "reasoning", "reasoning_content", "tool_calls", "function_call", "refusal")
Message = dict[str, str]


class Unreadable(Exception):
    """An answer that does not follow its dialect."""


class Refused(Exception):
    """An error event within a stream, with its type and message."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(slots=True)
class Answer:
    """The content of a complete answer, or of the events of a stream so far."""

    text: str = ""
    tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    queue: float | None = None
    batch_mean: float | None = None
    batch_max: int | None = None
    finish_reason: str = ""
    id: str = ""
    ended: bool = False
    uncounted: bool = False  # the tokens of some chunk are unknown


@dataclass(frozen=True, slots=True)
class Dialect:
    """A form of requests: one of `APIS` or chat, streamed or not, with the model's name if the API requires one.

    Without a `temperature`, requests name none, except in the API openai, where servers may have defaults of their own.
    `counts` is for servers that take more than OpenAI's API: it asks for the usage in each chunk, and sends what is known of a
    program.
    """

    api: str = "inference"
    stream: bool = False
    model: str | None = None
    temperature: float | None = None
    counts: bool = False

    def of(self, planned: Planned) -> Dialect:
        """Return the dialect of a request: chat messages have their own."""
        return self if planned.chat is None else replace(self, api="chat")

    @property
    def path(self) -> str:
        """The route to post to."""
        if self.api == "chat":
            return CHAT_PATH
        if self.api == "tgi":
            return "/generate_stream" if self.stream else "/generate"
        return "/v1/completions" if self.api == "openai" else "/inference"

    def body(self, planned: Planned, before: Sequence[Message] = (), **extra: Any) -> dict[str, Any]:
        """Return the body of a request for exactly `num_tokens` tokens, as far as the API allows that.

        A chat message follows the messages `before`, and the model ends its answer.
        """
        warmth = {} if self.temperature is None else {"temperature": self.temperature}
        if self.api == "tgi":
            greedy = self.temperature == 0  # TGI takes only temperatures above 0
            drawn = {"do_sample": False} if greedy else {"do_sample": True, **warmth}
            details = {"details": True} if self.stream else {}
            parameters = {"max_new_tokens": planned.num_tokens, **drawn, **details, **extra}
            return {"inputs": planned.prompt, "parameters": parameters}
        user = {"user": planned.user} if planned.user else {}
        program = planned.call._asdict() if planned.call and planned.program else {}
        if program and (self.counts or self.api == "inference"):
            user |= {name: program[name] for name in ("program", "session", "keep_s") if program[name]}
        if self.api == "inference":
            streams = {"stream": True} if self.stream else {}
            return {"prompt": planned.prompt, "num_tokens": planned.num_tokens, **warmth, **user, **streams, **extra}
        usage = {"include_usage": True, **({"continuous_usage_stats": True} if self.counts else {})}
        stream = {"stream": True, "stream_options": usage} if self.stream else {}
        model = {"model": self.model} if self.model else {}
        if self.api == "chat":
            most: dict[str, Any] = {"max_tokens": planned.num_tokens} if planned.chat and planned.chat.capped else {}
            most |= {"ignore_eos": True} if program and self.counts else {}  # as long as the tree says
            messages = [*before, {"role": "user", "content": planned.prompt}]
            return {**model, "messages": messages, **most, **warmth, **user, **stream, **extra}
        return {
            **model, "prompt": planned.prompt, "max_tokens": planned.num_tokens, "temperature": 1.0,
            "ignore_eos": True, **warmth, **user, **stream, **extra,
        }  # fmt: skip

    def read(self, content: Any, headers: Mapping[str, str], planned: Planned) -> Answer:
        """Return a complete answer; raise Unreadable if it has no text."""
        answer = Answer(ended=True, id=headers.get("X-Request-Id", ""))
        readers = {"inference": _read_inference, "openai": _read_openai, "tgi": _read_tgi, "chat": _read_openai}
        text = readers[self.api](content, headers, answer) if isinstance(content, dict) else None
        if not isinstance(text, str):
            raise Unreadable(f"200 without a completion: {str(content)[:60]}")
        answer.text = text
        if answer.tokens is None and self.api == "chat":
            raise Unreadable("200 without usage, so the length of the answer is unknown")
        if answer.tokens is None:
            # Some servers do not report it; they generate what was requested.
            answer.tokens = planned.num_tokens
        return answer

    def feed(self, data: bytes, answer: Answer) -> int | None:
        """Add one event to an answer; return its number of tokens (0 if unknown), or None if it brings none.

        Raises `Refused` on an error event and `Unreadable` on what is no event of the dialect.
        """
        if data == b"[DONE]":
            answer.ended = True
        if data in (b"[DONE]", b""):
            return None
        event = read_json(data)
        if not isinstance(event, dict):
            raise Unreadable(f"not an event: {data[:60]!r}")
        if event.get("error"):
            raise Refused(*fault(event))
        feeders = {"inference": _feed_inference, "openai": _feed_openai, "tgi": _feed_tgi, "chat": _feed_openai}
        return feeders[self.api](event, answer)


def fault(content: Any) -> tuple[str, str]:
    """Return the type and the message of an error object of any dialect; "" if missing."""
    if not isinstance(content, dict):
        return "", ""
    error = content.get("error")
    if not isinstance(error, dict):
        error = {"message": error, "type": content.get("error_type")}
    kind = error.get("type")
    return kind[:40] if isinstance(kind, str) else "", str(error.get("message") or "")


def status_failure(status: int, content: Any) -> tuple[str, str]:
    """Return the kind and the detail of a failure with this HTTP status."""
    kind, message = fault(content)
    return f"HTTP {status}" + (f" ({kind})" if kind else ""), message


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _count(value: Any) -> int | None:
    """Return a number of tokens, which some servers write as 6.0; None for anything else."""
    is_count = type(value) in (int, float) and 0 <= value <= MOST_TOKENS and value == int(value)
    return int(value) if is_count else None


def _add_facts(content: Mapping[str, Any], answer: Answer) -> None:
    timings = content.get("timings")
    timings = timings if isinstance(timings, dict) else {}
    answer.tokens = _count(content.get("num_tokens"))
    answer.prompt_tokens = _count(content.get("prompt_tokens"))
    answer.cached_tokens = _count(content.get("cached_tokens"))
    answer.queue = _number(timings.get("queue_s"))
    answer.batch_mean = _number(timings.get("batch_mean"))
    answer.batch_max = _count(timings.get("batch_max"))
    answer.id = str(content.get("id") or answer.id)


# Each reader takes the facts from a whole answer, and returns its text, which may be of any type.
def _read_inference(content: Mapping[str, Any], _: Mapping[str, str], answer: Answer) -> Any:
    _add_facts(content, answer)
    return content.get("completion")


def _feed_inference(event: Mapping[str, Any], answer: Answer) -> int | None:
    text = event.get("text")
    if not isinstance(text, str):
        raise Unreadable(f"event without text: {str(event)[:60]}")
    answer.text += text
    if "finish_reason" in event:
        _add_facts(event, answer)
    return 0 if text else None


def _usage(content: Mapping[str, Any], answer: Answer) -> int:
    """Read the usage; return how many completion tokens it has more than before."""
    usage = content.get("usage")
    if not isinstance(usage, dict):
        return 0
    before = answer.tokens or 0
    completion, prompt = (_count(usage.get(name)) for name in ("completion_tokens", "prompt_tokens"))
    answer.tokens = before or None if completion is None else completion
    answer.prompt_tokens = answer.prompt_tokens if prompt is None else prompt
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict):
        answer.cached_tokens = _count(details.get("cached_tokens"))
    return max(0, (answer.tokens or 0) - before)


def _read_openai(content: Mapping[str, Any], _: Mapping[str, str], answer: Answer) -> Any:
    """Read a completion, or the answer to a chat."""
    answer.id = str(content.get("id") or answer.id)
    _usage(content, answer)
    choices = content.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or not isinstance(message := choice.get("message"), dict):
        return choice.get("text") if isinstance(choice, dict) else None
    answer.finish_reason = _text(choice.get("finish_reason"))
    return _text(message.get("content"))


def _feed_openai(event: Mapping[str, Any], answer: Answer) -> int | None:
    """Read an event of a completion, or of the answer to a chat."""
    answer.id = answer.id or str(event.get("id") or "")  # a header has the id by which the server knows the request
    grown, has_said, choices = _usage(event, answer), False, event.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
        raise Unreadable(f"event without choices: {str(event)[:60]}")
    for choice in choices:
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else {}
        text = _text(delta.get("content")) or _text(choice.get("text"))
        answer.text += text
        has_said |= bool(text) or any(delta.get(name) for name in SAID)
        answer.finish_reason = _text(choice.get("finish_reason")) or answer.finish_reason
        answer.ended |= bool(choice.get("finish_reason"))
    # Some servers send no [DONE]. The usage of the whole request is in an event without choices.
    answer.ended |= not choices and isinstance(event.get("usage"), dict)
    if has_said:
        answer.uncounted |= not grown
        return grown
    # A token may have no text of its own, such as half a character. But usage that comes only at the end is no token:
    # it counts the chunks before it.
    return grown if grown and choices and not answer.uncounted else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _read_tgi(content: Mapping[str, Any], headers: Mapping[str, str], answer: Answer) -> Any:
    answer.tokens = _header(headers, "x-generated-tokens")
    answer.prompt_tokens = _header(headers, "x-prompt-tokens")
    queue = _header(headers, "x-queue-time")
    answer.queue = None if queue is None else queue / 1000
    return content.get("generated_text")


def _header(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name, "")
    return int(text) if text.isdecimal() else None


def _feed_tgi(event: Mapping[str, Any], answer: Answer) -> int | None:
    token, text = event.get("token"), event.get("generated_text")
    if not isinstance(token, dict) and not isinstance(text, str):
        raise Unreadable(f"event without token: {str(event)[:60]}")
    details = event.get("details")
    if isinstance(details, dict):
        answer.tokens = _count(details.get("generated_tokens"))
        answer.prompt_tokens = _count(details.get("input_length"))
    # Only the last event has the whole text, and its details only if they were asked for.
    answer.ended |= isinstance(text, str) or isinstance(details, dict)
    if not isinstance(token, dict):
        return None
    answer.text += _text(token.get("text"))
    return 0
