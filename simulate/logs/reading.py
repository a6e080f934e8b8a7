"""What a reader finds in a file: requests with the times of the file's clocks, and what the file says of the server.

This module must not know the format of any file, nor judge what is in it: `checks.py` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Any, NamedTuple

NAN = math.nan


class Request(NamedTuple):
    """One request as a file has it, in seconds of the file's clocks; NaN and 0: the file does not say.

    `sent` is when the client sent it or the server received it. `queued` is given where `sent` is of another clock than `first`
    and `last`: when the server's scheduler saw it, on their clock. `chunks` are the times of all chunks of the answer, `counts`
    the tokens of each, if not 1. `cached` are prompt tokens that the server found in its prefix cache. `prefix` is the id of a
    request before it and with how many tokens of that both begin. `error`: why there is no whole answer.
    """

    sent: float
    prompt: int
    output: int
    first: float = NAN
    last: float = NAN
    id: str = ""
    queued: float = NAN
    chunks: Many[float] = ()
    counts: Many[int] = ()
    limit: int = 0  # max_tokens
    client: str = ""
    priority: int = 0
    cached: int = 0
    prefix: Many[Any] = ()
    error: str = ""


class Note(NamedTuple):
    """What is wrong with a log, as a sentence, and how many times as wide it makes the intervals."""

    text: str
    widening: float = 1.0


class Reading(NamedTuple):
    """What a reader found in a file: the requests, what it says of the server, and the server's steps, if it has them.

    The names in `server` are `engine` (vllm, ...), `version`, `model`, `hardware`, and those of `simulate.scenario.Engine`: slots,
    tokens_per_step, kv_tokens, page_size, prefix_cache; `policy` and `policy_options` of our own server. `steps` are records as
    /events sends them. `notes` are what such a file leaves open.
    """

    requests: list[Request]
    server: Mapping[str, Any] = {}
    steps: Many[Mapping[str, Any]] = ()
    notes: tuple[Note, ...] = ()
