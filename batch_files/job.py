"""A batch that is computed: its files, the lines that are open, and their results.

It must not know threads, other batches, or how a line is computed.
"""

from __future__ import annotations

import json
import queue
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from batch_files.lines import BadLine, Limits, Line, Pending
from batch_files.output import LineFile
from batch_files.store import Row


@dataclass(slots=True)
class Job:
    """The batch that is computed now."""

    row: Row
    answered: LineFile
    errors: LineFile
    completed: int = 0
    failed: int = 0
    lines: Iterator[Line | BadLine] = field(default_factory=lambda: iter(()))
    open: dict[int, Line] = field(default_factory=dict)
    again: deque[tuple[float, Line]] = field(default_factory=deque)  # when, and which
    results: queue.SimpleQueue[tuple[int, int, str, bytes]] = field(default_factory=queue.SimpleQueue)
    counted_at: float = 0.0

    def __post_init__(self) -> None:
        self.completed, self.failed = self.answered.lines(), self.errors.lines()

    @property
    def id(self) -> str:
        return str(self.row["id"])

    def pending(self, file: BinaryIO, limits: Limits) -> Pending:
        """Return the lines of the batch that have no answer yet."""
        with self.answered.reader() as answered, self.errors.reader() as errors:
            return Pending(file, [answered, errors], self.row["endpoint"], limits)

    def request_id(self, number: int) -> str:
        """Return the id of the request that computes a line."""
        return f"{self.id}.{number}"


def is_final(body: Any) -> bool:
    """Return whether a refusal is this line's own fault: alone it does not fit into memory."""
    error = body.get("error") if isinstance(body, dict) else None
    return isinstance(error, dict) and error.get("type") == "out_of_memory"


def read_json(data: bytes) -> Any:
    """Return the body of an answer, or the beginning of its text if it is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data[:10_000].decode("utf-8", "replace")
