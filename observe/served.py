"""The latest requests served, in bounded memory: when each arrived, got its first token and ended, and under which policy.

A client that measures the server asks for what is new. It must not know HTTP.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from scheduling.iteration import Iteration
from serving.inference import Inference, outcome

KEPT = 4096  # requests that have ended


class ServedLog:
    """The requests that are open, and the latest that have ended; `policy` returns the name of the active policy."""

    def __init__(self, policy: Callable[[], str], clock: Callable[[], float] = time.perf_counter) -> None:
        self._policy, self._clock = policy, clock
        self._open: dict[str, tuple[Inference, str]] = {}
        self._ended: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._count = 0

    def on_arrival(self, inference: Inference) -> None:
        """Note an arrival and the policy that it found. Copies and background work are left out."""
        if inference.first is None and not inference.is_background:
            self._open[inference.id] = inference, self._policy()

    def observe(self, iteration: Iteration | None, left: list[Inference]) -> None:
        """Note the requests that left; called in the loop's thread."""
        for inference in left:
            if found := self._open.pop(inference.id, None):
                self._ended.append(_row(*found))
                self._count += 1

    def since(self, number: int) -> dict[str, Any]:
        """Return the requests that ended after the first `number`, those that are open, and the number to ask for next."""
        count, ended, now = self._count, list(self._ended), self._clock()
        opened = [_row(*found) for found in self._open.copy().values()]
        new = ended[max(0, len(ended) - max(0, count - number)) :]
        return {"now": now, "next": count, "lost": max(0, count - number - len(new)), "ended": new, "open": opened}


def _row(inference: Inference, policy: str) -> dict[str, Any]:
    """Return what is told of a request; its client's name is hashed."""
    seq = inference.sequence
    client = blake2b(seq.client.encode("utf-8", "replace"), digest_size=4).hexdigest() if seq.client else ""
    failed = seq.finished_at is not None and outcome(inference) not in ("stop", "length")
    return {
        "id": inference.id, "at": seq.arrived_at, "first": seq.first_token_at, "end": seq.finished_at,
        "tokens": len(seq.output_ids), "failed": failed, "client": client, "policy": policy,
    }  # fmt: skip
