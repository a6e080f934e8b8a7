"""Answers that are read while they grow: which of them have new text, and the frames of server-sent events.

A handler sends the first and the last frames itself, and lends its socket in between to the one thread that writes for
all (`api/socket_writer.py`). Where that is impossible (TLS, a fixed number of tokens per frame), the loop notifies the
generation's wakeup, at most once a step. This module must not know what a dialect's events look like.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from flask import Response, current_app, request, stream_with_context

from api.generation import Generation
from api.http import errors
from api.http.errors import ApiError
from api.service import Service
from api.socket_writer import LentSocket, Source
from batching import Inference, InferenceError
from observe.feed import data
from serving.inference import CHECK_SECONDS
from serving.wakeup import Wakeup

log = logging.getLogger(__name__)

SILENCE = 10.0  # seconds after which a comment shows that the server is alive
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


class Answers:
    """The unfinished answers of a stream, and the events for what is new in them."""

    def __init__(self, readers: list[StreamReader], encode: Callable[[Delta], bytes]) -> None:
        self.live = readers
        self._encode = encode

    @property
    def unread(self) -> int:
        """The number of unread tokens of the answer that has most."""
        return max([reader.inference.ready - reader.taken for reader in self.live], default=0)

    def read(self) -> bytes:
        """Return the events that are ready; raise InferenceError when an answer has failed."""
        deltas = [delta for reader in self.live if (delta := reader.read()) is not None]
        self.live = [reader for reader in self.live if not reader.done]
        return b"".join(map(self._encode, deltas))

    def has_fewer_than(self, tokens: int) -> bool:
        """Return whether to wait for more tokens; the first token of an answer and its end never wait."""
        return not any(r.inference.is_finished or r.unread >= (tokens if r.taken else 1) for r in self.live)


def frames(
    generation: Generation,
    answers: Answers,
    tokens_together: int | None = None,
    lent: LentSocket | None = None,
    ping: bytes = PING,
) -> Iterator[bytes]:
    """Yield events until all answers have ended, and a `ping` after `SILENCE` seconds without any.

    With `tokens_together` a frame has that many tokens, otherwise all there are. With a `lent` socket, the writer sends what
    comes between the first frame and the last.
    """
    wakeup, spoke_at, has_begun = generation.wakeup, time.perf_counter(), False
    assert wakeup is not None
    while answers.live:
        # The head of the response goes out with the first frame: before it, the writer may not write to the socket.
        is_written_here = lent is None or not has_begun
        wakeup.wants_tokens = is_written_here  # before looking for tokens: one that comes later wakes this handler
        frame = b"" if tokens_together and answers.has_fewer_than(tokens_together) else answers.read()
        now = time.perf_counter()
        if frame:
            wakeup.wants_tokens = False
            yield frame
            spoke_at, has_begun = time.perf_counter(), True
        elif not answers.live or (now >= generation.ends_at and generation.end_if_late(now)):
            continue
        elif now - spoke_at >= SILENCE:
            spoke_at = now
            yield ping
        else:
            # Until the client must be told something, or the request is late, or may have been lost.
            patience = min(spoke_at + SILENCE - now, generation.ends_at - now, CHECK_SECONDS)
            if lent is None or is_written_here:
                if wakeup.wait(patience):
                    continue
            else:  # the writer gives the socket back when an answer has ended, has failed or is read too slowly
                spoke_at = max(spoke_at, lent.lend(patience))
                lent.finish()
            generation.end_if_lost()


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

    `encode` writes what is new in a choice and `end` the last events of a success; `event` writes an error. A failed
    stream ends without `end`, so that no client takes it for a whole answer. `ping` shows a client that waits that the
    server is alive.
    """
    answers = Answers([StreamReader(i, each, scored=scored) for i, each in enumerate(generation.inferences)], encode)
    assert generation.wakeup is not None
    lent = lent_socket(generation.wakeup, answers) if tokens_together is None else None

    def events() -> Iterator[bytes]:
        try:
            yield from frames(generation, answers, tokens_together, lent, ping)
            yield end()
        except InferenceError as error:
            error.__traceback__ = None  # its frames refer to it, so both would live until the next GC
            generation.cancel(error)
            yield event(errors.content(errors.from_inference(error)))
        except OSError:  # of the client's socket: the HTTP server handles it
            raise
        except Exception:
            log.exception("a stream failed")
            generation.cancel()
            failed = ApiError("internal error on this request. Try another request", type="server_error")
            yield event(errors.content(failed))

    return event_stream(stream_with_context(events()), media)


def event_stream(frames: Iterator[bytes], media: str = EVENTS) -> Response:
    """Return a response of server-sent events, or of other `media`, which no proxy may cache or collect."""
    response = Response(frames, content_type=media)
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"
    return response


def lent_socket(wakeup: Wakeup, source: Source, *, paced: bool = False) -> LentSocket | None:
    """Return the socket of this request to lend to the writer; None under TLS."""
    sock = request.environ.get("gunicorn.socket")
    if type(sock) is not socket.socket:
        return None
    service: Service = current_app.extensions["service"]
    is_chunked = request.environ["SERVER_PROTOCOL"] == "HTTP/1.1"  # as gunicorn frames a response without a length
    return LentSocket(service.socket_writer, sock, wakeup, source, paced, is_chunked)
