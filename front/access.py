"""The lines of a queue's access log: named as in the server's (`api/hooks/middleware.py`), and the upstream. Never texts.

This module must not know the log.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from front.clients import Client
from front.door import GONE

if TYPE_CHECKING:
    from front.asked import Asked
    from front.relay import Relay


def record(request: web.Request, status: int, seconds: float) -> dict[str, Any]:
    """Return what is logged of a request, which may have been refused before it was read or queued."""
    notes = cast(Client, request.protocol).notes
    asked: Asked | None = notes.get("asked")
    relay: Relay | None = notes.get("relay")
    line: dict[str, Any] = {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "id": request.headers.get("X-Request-Id", "")[:128],
        "client": request.remote if asked is None else asked.client,
        "method": request.method, "route": request.path[:200], "status": status, "seconds": round(seconds, 6),
        "bytes_in": request.content_length,
    }  # fmt: skip
    if "error" in notes:
        line["error"] = notes["error"]
    if asked is None or relay is None:
        return line
    turn = relay.turn
    seq, error = turn.inference.sequence, turn.error or turn.inference.error
    return line | {
        "id": seq.id,
        "prompt_tokens": len(asked.prompt) if relay.prompt_tokens is None else relay.prompt_tokens,
        "output_tokens": relay.output_tokens,
        "choices": asked.choices,
        "finish_reason": error.kind if error is not None else "cancelled" if status == GONE else turn.ended,
        "queue_s": None if seq.scheduled_at is None else round(seq.scheduled_at - seq.arrived_at, 6),
        "ttft_s": None if seq.first_token_at is None else round(seq.first_token_at - seq.arrived_at, 6),
        "streams": asked.streams,
        "upstream": turn.where,
    }
