"""ASGI middleware of vLLM's API process: tells the scheduler who sent a request, and answers 429 if a policy refused it.

A client is the header X-Client, else `user`, else the key. It is added to the body's `vllm_xargs`, with `slo_s` and
`program`. vLLM ends a refused request as if it were complete, so the first bytes of an answer are held back until that is known.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from scheduling.sequence import PROGRAM_HEADERS

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
SHOW_REASON = ("/v1/completions", "/v1/chat/completions")  # the other dialects' answers do not say why they ended
PATHS = (*SHOW_REASON, "/v1/responses", "/v1/messages")
LONGEST_NAME = 200
WORDS = "the policy refused this request. Try again later"
ERROR = json.dumps({"error": {"message": WORDS, "type": "overloaded", "param": None, "code": "overloaded"}}).encode()
HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(ERROR)), (b"retry-after", b"1")]


class Middleware:
    """Wraps vLLM's app."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            return await self.app(scope, receive, send)
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":  # the client has left
                return None
            body, more = body + message.get("body", b""), message.get("more_body", False)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        body = marked(body, headers, scope["path"] in SHOW_REASON)
        kept = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
        given: list[Message] = [{"type": "http.request", "body": body}]
        held: list[Message] | None = []
        refused = False

        async def read() -> Message:
            return given.pop() if given else await receive()

        async def write(message: Message) -> None:
            nonlocal held, refused
            if held is None:
                return None if refused else await send(message)
            held.append(message)
            text = message.get("body", b"")
            is_empty = b'"role":"assistant"' in text and b'"content":""' in text and message.get("more_body")
            if message["type"] == "http.response.start" or is_empty:
                return None  # a chat's stream begins so
            # A stream that ends before it has begun, too: vLLM leaves out chunks without tokens.
            if refused := is_refusal(text) or text.startswith(b"data: [DONE]"):
                held = [{**held[0], "status": 429, "headers": HEADERS}, {"type": "http.response.body", "body": ERROR}]
            for one in held:
                await send(one)
            held = None

        return await self.app({**scope, "headers": [*kept, (b"content-length", b"%d" % len(body))]}, read, write)


def is_refusal(body: bytes) -> bool:
    """Return whether vLLM ended a choice of an answer, or of an event, because a policy refused it; a text may say so, too."""
    if b"refused_by_policy" in body:
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            choices = json.loads(body.removeprefix(b"data: "))["choices"]
            ends = [(choice.get("finish_reason"), choice.get("stop_reason")) for choice in choices]
            return ("abort", "refused_by_policy") in ends
    return False


def marked(body: bytes, headers: dict[str, str], shows_reason: bool = False) -> bytes:
    """Return a body with its client, deadline and program for the scheduler; a body that is no object is unchanged."""
    fields: Any = None
    with suppress(ValueError):
        fields = json.loads(body)
    if not isinstance(fields, dict) or not isinstance(extra := fields.get("vllm_xargs") or {}, dict):
        return body
    key, user = headers.get("authorization") or headers.get("x-api-key") or "", fields.get("user")
    client = headers.get("x-client") or (user if isinstance(user, str) else "")
    client = client[:LONGEST_NAME] or (f"key-{blake2b(key.encode(), digest_size=4).hexdigest()}" if key else "")
    hints: dict[str, Any] = {"client": client} if client else {}
    with suppress(KeyError, TypeError, ValueError):
        hints["slo_s"] = max(0.0, float(headers.get("x-slo") or fields.pop("slo_s")))
    named = (extra.get("program"), fields.pop("program", ""), *(headers.get(name.lower()) for name in PROGRAM_HEADERS))
    if program := next((name for name in named if name and isinstance(name, str)), ""):
        hints["program"] = program[:LONGEST_NAME]
    if shows_reason:
        hints["shows_reason"] = 1
    return json.dumps({**fields, "vllm_xargs": {**extra, **hints}}).encode() if hints else body
