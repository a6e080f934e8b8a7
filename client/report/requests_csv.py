"""requests.csv: a line for each request of a run, written as soon as the request ends."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import Any, TextIO

from .measure import Outcome

COLUMNS = (
    "index", "id", "client", "arrival_s", "sent_s", "prompt_tokens", "cached_tokens", "asked_tokens",
    "output_tokens", "queue_s", "ttft_s", "tpot_s", "latency_s", "batch_mean", "batch_max", "outcome",
    "max_tokens",
)  # fmt: skip


class Record:
    """Writes a CSV line for each request as soon as it ends, so that nothing measured is lost."""

    def __init__(self, file: TextIO, before: Sequence[str] = (), names: Sequence[str] = ()) -> None:
        self._file = file
        self._writer = csv.writer(file, lineterminator="\n")
        self.before = list(before)
        if names or not before:
            self._writer.writerow([*names, *COLUMNS])

    def write(self, outcome: Outcome) -> None:
        """Write one line and flush it."""
        self._writer.writerow([*self.before, *_cells(outcome)])
        self._file.flush()


def _cells(o: Outcome) -> list[Any]:
    times = (o.queue, o.ttft, o.tpot, o.latency)
    queue, ttft, tpot, latency = ("" if t is None else f"{t:.6f}" for t in times)
    return [
        o.index, o.id, o.user, f"{o.intended:.6f}", f"{o.sent:.6f}", o.prompt_tokens, o.cached_tokens,
        o.asked_tokens, o.tokens, queue, ttft, tpot, latency, o.batch_mean, o.batch_max,
        o.error or "complete", o.max_tokens,
    ]  # fmt: skip
