"""What step records of our own server, as /events sends them and iterations.jsonl has them, say of each request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

Row = Mapping[str, Any]


def requests(rows: Sequence[Row]) -> list[Row]:
    """Return the requests by the names of `Request`; they count as sent when they joined."""
    parts: dict[str, list[tuple[float, Row]]] = {}
    begins: dict[str, float] = {}
    for row in rows:
        for member in row["members"]:
            if member["phase"] in ("prefill", "decode"):
                begins.setdefault(member["id"], row["t"])
                parts.setdefault(member["id"], []).append((row["t"] + row["seconds"], member))
    reasons = {left["id"]: left["reason"] for row in rows for left in row["left"]}
    found: list[Row] = []
    for id, some in parts.items():
        prompt = next((m["computed"] - m["tokens"] for _, m in some if m["phase"] == "decode"), some[-1][1]["computed"])
        # So far it has the tokens that were computed behind the prompt and the one that was sampled, but drafts may go beyond
        # its end. A preempted request computes some again.
        so_far = accumulate((min(m["computed"] + 1, m["total"]) - prompt for _, m in some), max, initial=0)
        chunks = [(end, after - before) for (end, _), (before, after) in zip(some, pairwise(so_far)) if after > before]
        times, counts = [*zip(*chunks)] or ((), ())
        found.append({
            "id": id, "sent": begins[id], "prompt": prompt, "output": sum(counts), "chunks": times, "counts": counts,
            "first": min(times, default=None), "last": max(times, default=None),
            "cached": some[0][1]["computed"] - some[0][1]["tokens"],
            "error": reasons.get(id) not in ("length", "stop") and "unfinished",
        })  # fmt: skip
    return found


def expanded(record: Row) -> Iterator[Row]:
    """Yield the equal steps for which a record stands."""
    last = record.get("repeat", 1) - 1
    for i in range(last + 1):
        members = [{**m, "computed": m["computed"] + i * m["tokens"]} for m in record["members"]]
        left = record["left"] if i == last else []
        yield {**record, "t": record["t"] + i * record["seconds"], "members": members, "left": left}
