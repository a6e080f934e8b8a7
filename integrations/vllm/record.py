"""The record of what a policy decided in an engine: a line of JSON for each arrival, cancellation and step. Pure but for files.

Prompts are not written: only their lengths, and a hash of each full page and all before it, so that equal beginnings show.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any
from zlib import crc32

from scheduling.sequence import Sequence

LOOK_EVERY = 0.25  # seconds between two checks of the file that names another policy


class Record:
    """A record that is being written, none if its path is empty; PATH.policy is the policy that another process requests."""

    def __init__(self, path: str, head: dict[str, Any]) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) if path else -1
        self._wanted, self._looks_at, self._seen = f"{path}.policy", 0.0, 0
        with suppress(OSError):
            self._seen = os.stat(self._wanted).st_mtime_ns  # one that was requested of an earlier run
        self.write(head)

    def write(self, line: dict[str, Any]) -> None:
        """Write a line; after an error, such as a full disk, write nothing more."""
        if self._file < 0:
            return
        try:
            os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")
        except OSError:
            self._file = -1

    def wanted(self, now: float) -> dict[str, Any] | None:
        """Return the requested policy, once."""
        if self._file < 0 or now < self._looks_at:
            return None
        self._looks_at = now + LOOK_EVERY
        with suppress(OSError, ValueError):
            seen, self._seen = self._seen, os.stat(self._wanted).st_mtime_ns
            if seen != self._seen:
                with open(self._wanted) as file:
                    found = json.load(file)
                return found if isinstance(found, dict) else None
        return None

    def arrival(self, seq: Sequence) -> None:
        """Write that a request arrived."""
        names = ("max_tokens", "client", "priority", "deadline", "open_ended", "adapter", "session", "constrained")
        self.write(
            {"arrive": seq.id, "at": seq.arrived_at, "prompt": len(seq.prompt_ids),
             "program": seq.program, "pages": [crc32(page) for page in seq.hashes], **{name: getattr(seq, name) for name in names}}
        )  # fmt: skip
