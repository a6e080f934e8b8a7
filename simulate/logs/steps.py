"""Step records of our own server, as /events sends them and iterations.jsonl has them: what they say of each request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Many
from itertools import accumulate, pairwise
from typing import Any

from simulate.logs.reading import Note

Row = Mapping[str, Any]
NOTE = Note(
    "Step records have no arrivals: requests count as arrived when they joined, so that waiting is not fitted.", 1.5
)


def requests(rows: Many[Row]) -> list[Row]:
    """Return the requests by the names of `Request`."""
    parts: defaultdict[str, list[tuple[Row, Row]]] = defaultdict(list)
    for row in rows:
        for member in row["members"]:
            if member["phase"] in ("prefill", "decode"):
                parts[member["id"]].append((row, member))
    reasons = {left["id"]: left["reason"] for row in rows for left in row["left"]}
    return [_request(id, some, reasons.get(id, "unfinished")) for id, some in parts.items()]


def facts(rows: Many[Row]) -> Row:
    """Return what the steps say of the server."""
    slots = max(round(sum(row["slot_steps"].values())) for row in rows)
    return {"engine": "ours", "policy": rows[0]["policy"], "slots": slots, "steps": rows, "notes": (NOTE,)}


def _request(id: str, parts: list[tuple[Row, Row]], reason: str) -> Row:
    (begin, joined), (_, latest) = parts[0], parts[-1]
    prompt = next((m["computed"] - m["tokens"] for _, m in parts if m["phase"] == "decode"), latest["computed"])
    # So far it has the tokens that were computed behind the prompt and the one that was sampled, but drafts may go beyond its
    # end. A preempted request computes some again.
    so_far = accumulate((min(m["computed"] + 1, m["total"]) - prompt for _, m in parts), max, initial=0)
    chunks = [(row["t"] + row["seconds"], b - a) for (row, _), (a, b) in zip(parts, pairwise(so_far)) if b > a]
    times, counts = [end for end, _ in chunks], [count for _, count in chunks]
    return {
        "id": id, "sent": begin["t"], "prompt": prompt, "output": sum(counts), "chunks": times, "counts": counts,
        "first": min(times, default=None), "last": max(times, default=None),
        "cached": joined["computed"] - joined["tokens"], "error": reason not in ("length", "stop") and reason,
    }  # fmt: skip
