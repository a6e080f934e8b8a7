"""What a server sends to its simulator: the requests that it served, the time of its steps, its policy and its size.

This module must not know the questions about them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from batching import BatchingManager
from observe.replay.recording import Recording, Served
from observe.replay.simulator_process import in_pieces

ROWS_PER_LINE, STRETCHES_PER_LINE = 50, 10  # of JSON encoded at once, because the loop needs the GIL


class Server:
    """What a simulation must know about a server.

    `served` is the name under which the manager's policy can be created again, if that is not its own name. If it is `late`,
    requests reach what computes them a step after they joined. `engines` are the slots of each engine, if several serve its
    queue. `inside` means that the policy decides inside vLLM.
    """

    def __init__(
        self, manager: BatchingManager, recording: Recording, *, served: str = "", slots: int = 0, cost: str = "",
        late: bool = False, engines: Sequence[int] = (), inside: bool = False,
    ) -> None:  # fmt: skip
        self.manager = manager
        self.recording = recording
        self.slots = slots or manager.max_batch_size
        self._first = (manager.policy_name, served or manager.policy_name)
        self._cost, self.late, self.engines, self._inside = cost, late, list(engines), inside

    def question(self, requests: list[Served], **ask: Any) -> Iterator[str]:
        """Yield the lines of a question: requests, step times, how the requests were scheduled, and what is asked."""
        numbers: dict[bytes, int] = {}  # in place of long hashes
        places = {r.id: place for place, r in enumerate(requests) if r.latency is not None}
        rows = (
            (*r[1:10], [numbers.setdefault(page, len(numbers)) for page in r.hashes], r.drafts, r.waited, r.constrained,
             r.program, [places[id] for id in r.after if id in places])
            for r in requests
        )  # fmt: skip
        yield from in_pieces("requests", rows, ROWS_PER_LINE)
        steps = ((*step, seconds) for step, seconds in self.recording.steps())
        yield from in_pieces("steps", steps, ROWS_PER_LINE)
        if requests:
            end = max(one.at + (one.latency or 0.0) for one in requests)
            yield json.dumps({"ids": [one.id for one in requests]}) + "\n"
            stretches = (stretch.row() for stretch in self.recording.stretches(requests[0].at, end))
            yield from in_pieces("stretches", stretches, STRETCHES_PER_LINE)
        yield json.dumps({"ask": {**ask, **self._describe()}}) + "\n"

    def _describe(self) -> dict[str, Any]:
        """Return the server's policy, its size, and what its steps cost."""
        manager = self.manager
        name, created_as = self._first
        served = created_as if manager.policy_name == name else manager.policy_name
        pages = manager.pages
        kv = (pages.total, pages.page_size) if pages is not None else (0, 16)
        drafts = manager.speculator.fixed if manager.speculator is not None else 0
        return {
            "served": [served, manager.policy_options],
            "machine": [self.slots, manager.max_tokens_per_step, *kv, drafts],
            "sigma": self.recording.mean_gap(),
            "cost": self._cost,
            "late": self.late,
            "engines": self.engines,
            "inside": self._inside,
        }
