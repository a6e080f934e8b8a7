"""What a replica of our own server answers before the first token, when another replica can still take its place.

Until then nothing passes, so an attempt that is refused or breaks leaves no trace. This module must not know queues, or which
replica is next.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp

from integrations.queue.parsing import parse

REFUSALS = (429, 503, 529)  # statuses with which a replica may refuse
STREAM = "text/event-stream"


def is_refusal(body: bytes) -> bool:
    """Return whether an answer or event of this content means that another replica may take the request."""
    fields = parse(body)
    error = fields.get("error")
    inner = error if isinstance(error, dict) else {"type": fields.get("error_type")}
    if "details" in inner:  # Anthropic's form: too large for the memory of any replica
        return False
    kinds = ("overloaded", "rate_limit_error", "unavailable_error", "healthcheck", "overloaded_error")
    return inner.get("type") in kinds


async def pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield a replica's answer as it comes; ClientPayloadError if a stream has no event, or begins with a refusal.

    A stream passes in whole events, from the first that is no comment.
    """
    if answer.content_type != STREAM:
        if answer.status in REFUSALS:
            yield await answer.read()  # which may have been read before
        async for chunk in answer.content.iter_any():
            yield chunk
        return
    rest, has_begun = b"", False
    async for chunk in answer.content.iter_any():
        ready, end, rest = (rest + chunk).rpartition(b"\n\n")
        if not has_begun:
            # Comments keep a connection alive.
            first = next((event for event in ready.split(b"\n\n") if event and not event.startswith(b":")), b"")
            is_error = first.startswith((b'data: {"error"', b'data:{"error"', b"event: error"))
            if is_error and is_refusal(first.partition(b"data:")[2]):
                raise aiohttp.ClientPayloadError
            has_begun = bool(first)
        if ready and has_begun:
            yield ready + end
    if not has_begun:
        raise aiohttp.ClientPayloadError
    if rest:
        yield rest
