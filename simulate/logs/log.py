"""A log of requests of any server, as the fit needs it: one form, whatever file it came from, with what is wrong with it.

A log says when each request arrived, how long its prompt and its answer are, and when its first and its last token came. It
does not say when steps were, nor who was in them. This module must not know the format of any file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from simulate.trace import Trace

NAN = math.nan


class Request(NamedTuple):
    """One request as a file has it, in seconds of the file's clocks; NaN and 0: the file does not say.

    `sent` is when the client sent it or the server received it. `queued` is given where `sent` is of another clock than `first`
    and `last`: when the server's scheduler saw it, on their clock. `chunks` are the times of all chunks of the answer, `counts`
    the tokens of each, if not 1. `cached` are prompt tokens that the server found in its prefix cache. `pages` names the full
    pages of the prompt by numbers, equal where their tokens and all before them are. `error`: why there is no whole answer.
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
    pages: Many[int] = ()
    error: str = ""


class Reading(NamedTuple):
    """What a reader found in a file: the requests, what it says of the server, and the server's steps, if it has them.

    The names in `server` are `engine` (vllm, ...), `version`, `model`, `hardware`, and those of `simulate.scenario.Engine`: slots,
    tokens_per_step, kv_tokens, page_size, prefix_cache; `policy` and `policy_options` of our own server. `steps` are records as
    /events sends them.
    """

    requests: list[Request]
    server: Mapping[str, Any] = {}
    steps: Many[Mapping[str, Any]] = ()


class Note(NamedTuple):
    """What is wrong with a log, as a sentence, and how many times as wide it makes the intervals."""

    text: str
    widening: float = 1.0


@dataclass(frozen=True)
class Log:
    """Requests in order of arrival, whose times are seconds since the first arrival.

    `first` and `last` are arrays of when the first and last tokens came, NaN where unknown. `chunks` has the times of the chunks
    of each answer and the tokens of each, empty where unknown.
    """

    trace: Trace
    first: np.ndarray
    last: np.ndarray
    chunks: Many[tuple[np.ndarray, np.ndarray]] = ()
    server: Mapping[str, Any] = field(default_factory=dict)
    steps: Many[Mapping[str, Any]] = ()
    notes: tuple[Note, ...] = ()
    ids: Many[str] = ()

    @property
    def at(self) -> np.ndarray:
        """When the requests arrived."""
        return np.array([seen.at for seen in self.trace.seen])

    @property
    def prompt(self) -> np.ndarray:
        return np.array([seen.prompt for seen in self.trace.seen])

    @property
    def output(self) -> np.ndarray:
        return np.array([seen.tokens for seen in self.trace.seen])
