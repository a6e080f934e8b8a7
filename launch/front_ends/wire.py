"""Messages between a front end and the engine's process: a version, a length, and what `marshal` writes.

Both are forked from one process, so both run the same Python.

* To the engine's process: requests, ends of those that ended before their last token, and calls to make to `Meters`.
* To a front end, at first: facts of the engine, as `FACTS` names them. Then, after each step: the state of the loop, new
  tokens of streams, and what ended.
"""

from __future__ import annotations

import marshal
import socket
import struct
from collections.abc import Iterator
from typing import Any

from serving.inference import InferenceError

VERSION = 1
HEAD = struct.Struct("<BI")
FACTS = (
    "model_name", "device", "dtype", "quantize", "kv_dtype", "context", "vocabulary", "width", "n_pages", "page_size",
    "window", "tokens_per_step", "sampling", "other_names", "special_end", "stall_seconds",
)  # fmt: skip
# What a front end is told of a sequence that has ended, beside its tokens.
FIELDS = (
    "id", "finish_reason", "cached", "scheduled_at", "first_token_at", "last_token_at", "finished_at", "first_iteration",
    "last_iteration", "batch_sum", "batch_max", "drafted", "accepted",
)  # fmt: skip


def send(sock: socket.socket, message: Any) -> None:
    """Send a message; wait while the other end reads nothing. Raise ValueError for what `marshal` cannot write."""
    data = marshal.dumps(message)
    sock.sendall(HEAD.pack(VERSION, len(data)) + data)


def messages(sock: socket.socket) -> Iterator[Any]:
    """Yield messages until the other end has gone."""
    with sock.makefile("rb", 1 << 18) as file:
        try:
            while len(head := file.read(HEAD.size)) == HEAD.size:
                version, size = HEAD.unpack(head)
                if version != VERSION or len(data := file.read(size)) < size:
                    return
                yield marshal.loads(data)
        except OSError:  # reset
            return


def reason(error: InferenceError | None) -> tuple[str, str, int | None] | None:
    """Return the arguments of an error."""
    return None if error is None else (error.kind, str(error), error.retry_after)
