"""Answers that are read while they grow: which of them have new text, and the frames of server-sent events.

Under the project's gunicorn worker one thread reads and writes them all (`api/socket_writer.py`). Elsewhere (TLS, Flask's
test client) the handler waits, and the loop notifies the generation's wakeup, at most once a step. This module must not
know what a dialect's events look like.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from flask import Response, request

from api.generation import Generation
from api.http import errors
from api.http.errors import ApiError
from api.socket_writer import STREAM, Source
from batching import Inference, InferenceError
from observe.feed import data
from serving.inference import CHECK_SECONDS

log = logging.getLogger(__name__)

SILENCE = 10.0  # seconds after which a comment shows that the server is alive
POLL_SECONDS = 0.04  # between two looks at a source without a wakeup
PING = b": ping\n\n"  # a comment
EVENTS = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"


class Delta(NamedTuple):
    """The new part of one choice: its text, its tokens start..stop, and whether it has ended."""

    choice: int
    text: str
    start: int
    stop: int
    ended: bool


class StreamReader:
    """Reads one answer as it grows.

    With `scored`, a delta lists each token when its text is complete, even if it has none.
    """

    def __init__(self, choice: int, inference: Inference, *, scored: bool) -> None:
        assert inference.text is not None
        self.choice = choice
        self.inference = inference
        self.done = False
        self._text = inference.text.growing(follows_tokens=scored)
        self._scored = scored
        self.taken = 0  # tokens converted to text
        self._sent = 0  # tokens in the deltas so far

    @property
    def unread(self) -> int:
        """The number of tokens that have not been read."""
        return self.inference.ready - self.taken

    def read(self) -> Delta | None:
        """Return what is new, if anything; raise InferenceError when the answer has failed."""
        inference = self.inference
        if inference.is_finished:
            return self._end()
        if inference.ready == self.taken:
            return None
        start, self.taken = self.taken, inference.ready
        text = self._text.feed(inference.sequence.output_ids[start : self.taken])
        stop = self._text.shown_tokens if self._scored else self.taken
        if not text and not (self._scored and stop > self._sent):
            return None
        start, self._sent = self._sent, stop
        return Delta(self.choice, text, start, stop, False)

    def _end(self) -> Delta:
        if self.inference.error is not None:
            raise self.inference.error
        self.done = True
        count = len(self.inference.output_ids)
        return Delta(self.choice, self._text.rest(self.inference.answer), self._sent, count, True)


class EventStream:
    """The events of a generation, as `api/socket_writer.py` or a handler reads them; see `respond`."""

    paced = False

    def __init__(
        self, generation: Generation, scored: bool, encode: Callable[[Delta], bytes], end: Callable[[], bytes],
        failed: Callable[[ApiError], bytes], tokens_together: int | None, ping: bytes,
    ) -> None:  # fmt: skip
        assert generation.wakeup is not None
        self.wakeup = generation.wakeup
        self.ended = self.is_behind = False
        self.blocked_since: float | None = None
        self._generation = generation
        self._live = [StreamReader(i, each, scored=scored) for i, each in enumerate(generation.inferences)]
        self._encode = encode
        self._end = end
        self._failed = failed
        self._together = tokens_together
        self._ping = ping
        self._has_begun = False
        self._spoke_at = time.perf_counter()
        self._check_at = self._spoke_at + CHECK_SECONDS

    @property
    def ends_at(self) -> float:
        """The time of its own limit, which it must not exceed; the server's limit is looked at now and then."""
        return math.inf if self._generation.own_limit is None else self._generation.ends_at

    def read(self) -> bytes:
        """Return the events that are ready: the last ones when it ends, and a ping after `SILENCE` seconds without any."""
        try:
            return self._read()
        except InferenceError as error:
            error.__traceback__ = None  # its frames refer to it, so both would live until the next GC
            self._generation.cancel(error)
            api_error = errors.from_inference(error)
        except Exception:
            log.exception("a stream failed")
            self._generation.cancel()
            api_error = ApiError("internal error on this request. Try another request", type="server_error")
        self.ended = True
        return self._failed(api_error)

    def _read(self) -> bytes:
        generation = self._generation
        # Before looking for tokens: one that comes later wakes the reader. The writer looks after each step anyway.
        self.wakeup.wants_tokens = not (self._has_begun and self.wakeup.resume and self._together is None)
        frame = b"" if self._together and self._has_fewer_than(self._together) else self._new()
        self.is_behind = bool(frame) and not self._live  # the end has a frame of its own
        now = time.perf_counter()
        if frame:
            self._spoke_at, self._has_begun = now, True
            return frame
        if not self._live:
            self.ended = True
            return self._end()
        if now >= generation.ends_at and generation.end_if_late(now):
            return self._read()
        if now - self._spoke_at >= SILENCE:
            self._spoke_at = now
            return self._ping
        if now >= self._check_at:
            self._check_at = now + CHECK_SECONDS
            generation.end_if_lost()
        return b""

    def _new(self) -> bytes:
        """Return the events for what is new in the unfinished answers; raise InferenceError when one has failed."""
        deltas = [delta for reader in self._live if (delta := reader.read()) is not None]
        self._live = [reader for reader in self._live if not reader.done]
        return b"".join(map(self._encode, deltas))

    def _has_fewer_than(self, tokens: int) -> bool:
        """Return whether to wait for more tokens; the first token of an answer and its end never wait."""
        return not any(r.inference.is_finished or r.unread >= (tokens if r.taken else 1) for r in self._live)


def respond(
    generation: Generation,
    encode: Callable[[Delta], bytes],
    end: Callable[[], bytes] = lambda: DONE,
    *,
    scored: bool = False,
    tokens_together: int | None = None,
    event: Callable[[Any], bytes] = data,
    ping: bytes = PING,
    media: str = EVENTS,
) -> Response:
    """Return the response that streams a generation's events; leaving the request cancels what has not ended.

    `encode` writes what is new in a choice and `end` the last events of a success; `event` writes an error. They are called
    without Flask's context. A failed stream ends without `end`, so that no client takes it for a whole answer. `ping` shows
    a client that waits that the server is alive. With `tokens_together` a frame has that many tokens, otherwise all there are.
    """
    write = errors.writer()

    def failed(error: ApiError) -> bytes:
        return event(write(error)[1])

    return event_stream(EventStream(generation, scored, encode, end, failed, tokens_together, ping), media)


def event_stream(source: Source, media: str = EVENTS) -> Response:
    """Return a response of server-sent events, or of other `media`, which no proxy may cache or collect.

    Where a server takes the request from its thread, it hands the source to the writer; elsewhere this thread waits for it.
    """
    if request.method != "HEAD":  # which has no body
        request.environ[STREAM] = source
    response = Response(frames(source), content_type=media)
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"
    return response


def frames(source: Source) -> Iterator[bytes]:
    """Yield the bytes of a source as they become ready, in a thread that waits for them."""
    while not source.ended:
        if data := source.read():
            source.blocked_since = time.perf_counter()
            yield data
            source.blocked_since = None
        elif source.wakeup is not None:
            source.wakeup.wait(min(CHECK_SECONDS, source.ends_at - time.perf_counter()))
        else:
            time.sleep(POLL_SECONDS)
