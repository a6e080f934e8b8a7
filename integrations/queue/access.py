"""The lines of a queue's access log: the server's fields (`api/hooks/middleware.py`) and the upstream, never texts."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from aiohttp import web

from integrations.queue.door import GONE


def record(request: web.Request, notes: dict[str, Any], status: int, seconds: float) -> dict[str, Any]:
    """Return the log line of a request; `notes` has `hints` once it was read, and `relay` once it was queued."""
    hints, relay = notes.get("hints"), notes.get("relay")
    line = {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "id": request.headers.get("X-Request-Id", "")[:128], "client": hints.client if hints else request.remote,
        "method": request.method, "route": request.path[:200], "status": status, "seconds": round(seconds, 6),
        "bytes_in": request.content_length, **({"error": notes["error"]} if "error" in notes else {}),
    }  # fmt: skip
    if hints is None or relay is None:
        return line
    turn = relay.turn
    seq, error = turn.inference.sequence, turn.error or turn.inference.error
    since = (
        None if at is None else round(at - seq.arrived_at, 6) for at in (turn.begun_at or None, seq.first_token_at)
    )
    return line | {
        "id": seq.id, "prompt_tokens": relay.prompt_tokens or len(seq.prompt_ids), "output_tokens": relay.output_tokens,
        **({"told_tokens": relay.reported_tokens} if relay.reported_tokens else {}), "choices": hints.choices,
        "finish_reason": error.kind if error else "cancelled" if status == GONE else turn.ended,
        **dict(zip(("queue_s", "ttft_s"), since)), "streams": hints.streams, "upstream": turn.where,
    }  # fmt: skip
