"""Answers that are read while they grow: who has new text, and the frames of server-sent events.

A handler sends what it yields, and between the first piece and the last lends its stream to the one thread that
writes for all. Where that cannot be (another framing than chunks in the clear, pieces of so many tokens), the loop
notifies the job's wakeup at most once a step, and a reader that has just sent something sleeps out the time in which
tokens are put together before it listens again, if there will be some by then.
It must not know what a dialect's events look like.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from flask import Response, current_app, g, request, stream_with_context

from api.generation import Generation
from api.http import errors
from api.http.errors import ApiError
from api.service import Service
from api.stream_writer import INTERVAL, LentSocket
from batching import Inference, InferenceError
from observe.feed import dumps
from serving.inference import CHECK_SECONDS, Wakeup

log = logging.getLogger(__name__)

SILENCE = 10.0  # seconds after which a comment shows that the server is there
PING = b": ping\n\n"


class Delta(NamedTuple):
    """What one answer has more than before: text, tokens start..stop of it, and whether it has ended."""

    index: int
    text: str
    start: int
    stop: int
    ended: bool


class StreamReader:
    """Reads one answer; with `every_token` it also tells of tokens that add no text."""

    def __init__(self, index: int, inference: Inference, *, scored: bool, every_token: bool) -> None:
        assert inference.text is not None
        self.index = index
        self.inference = inference
        self.done = False
        self._text = inference.text.growing(follows_tokens=scored)
        self._scored = scored
        self._every = every_token
        self._read = 0  # tokens fed
        self._told = 0  # tokens told of

    @property
    def unread(self) -> int:
        return self.inference.ready - self._read

    @property
    def is_fresh(self) -> bool:
        return not self._read

    def look(self) -> Delta | None:
        """Return what there is to tell now; InferenceError when the answer has failed."""
        inference = self.inference
        if inference.is_finished:
            return self._end()
        if not self.unread:
            return None
        start, self._read = self._read, inference.ready
        text = self._text.feed(inference.sequence.output_ids[start : self._read])
        if not text and not self._every:
            return None
        stop = self._text.shown_tokens if self._scored and not self._every else self._read
        start, self._told = self._told, stop
        return Delta(self.index, text, start, stop, False)

    def _end(self) -> Delta:
        if self.inference.error is not None:
            raise self.inference.error
        self.done = True
        count = len(self.inference.output_ids)
        return Delta(self.index, self._text.rest(self.inference.answer), self._told, count, True)


class Answers:
    """The answers of a stream that have not ended, and the events of what they have grown by."""

    def __init__(self, followers: list[StreamReader], encode: Callable[[Delta], bytes]) -> None:
        self.live = followers
        self._encode = encode

    @property
    def unread(self) -> int:
        """How many tokens wait to be read, of the answer that has most."""
        return max([follower.unread for follower in self.live], default=0)

    def read(self) -> bytes:
        """Return the events that there are by now; InferenceError when an answer has failed."""
        grown = [g for follower in self.live if (g := follower.look()) is not None]
        self.live = [follower for follower in self.live if not follower.done]
        return b"".join(map(self._encode, grown))

    def too_few(self, together: int | None) -> bool:
        """Whether to wait for more tokens; the first of an answer and its end wait for nothing."""
        if together is None:
            return False
        return not any(f.inference.is_finished or f.unread >= together or (f.is_fresh and f.unread) for f in self.live)

    def end_if_lost(self) -> None:
        for follower in self.live:
            follower.inference.end_if_lost()


class Coalescer:
    """When a handler last sent something, and whether more will be there before it may send again."""

    def __init__(self, wakeup: Wakeup) -> None:
        self.sent_at = time.perf_counter() - INTERVAL
        self._wakeup = wakeup
        self._gap = INTERVAL  # seconds between tokens, as far as is known

    def sent(self, tokens: int) -> None:
        now = time.perf_counter()
        self._gap, self.sent_at = (now - self.sent_at) / (tokens or 1), now

    def sleep_out(self, unread: int) -> None:
        """Sleep while tokens are put together; an ending rings all the same."""
        left = INTERVAL - (time.perf_counter() - self.sent_at)
        if left > 0 and (self._gap < INTERVAL or unread):
            self._wakeup.wants_tokens = False
            self._wakeup.wait(left)


def pieces(
    job: Generation, answers: Answers, tokens_together: int | None = None, loan: LentSocket | None = None
) -> Iterator[bytes]:
    """Yield the events of what has grown, until all have ended, and a comment after `SILENCE` seconds without any.

    With `tokens_together` so many tokens make a piece, instead of those of `INTERVAL`. With a `loan`, what is between
    the first piece and the last is written by whom it is lent to.
    """
    wakeup = job.wakeup
    assert wakeup is not None
    pace, pinged_at, begun = Coalescer(wakeup), time.perf_counter(), False
    while answers.live:
        lends = loan if begun else None
        if lends is None and tokens_together is None:
            pace.sleep_out(answers.unread)
        wakeup.wants_tokens = lends is None
        tokens = answers.unread
        data = b"" if answers.too_few(tokens_together) else answers.read()
        now = time.perf_counter()
        if data:
            wakeup.wants_tokens, begun = False, True
            yield data
            pace.sent(tokens)
            pinged_at = pace.sent_at
        elif job.end_if_late(now):
            continue
        elif now - pinged_at >= SILENCE:
            pinged_at = now
            yield PING
        else:
            seconds = min(pinged_at + SILENCE - now, job.ends_at - now, CHECK_SECONDS)
            if lends is None:
                wakeup.wait(seconds)
            else:
                pinged_at = max(pinged_at, lends.sleep(seconds))
            answers.end_if_lost()


def respond(
    job: Generation,
    followers: list[StreamReader],
    encode: Callable[[Delta], bytes],
    end: Callable[[], bytes],
    *,
    space: bytes = b" ",
    tokens_together: int | None = None,
) -> Response:
    """Return the response that streams a job's events; leaving it early cancels what has not ended."""
    answers = Answers(followers, encode)
    loan = _loan(job, answers) if tokens_together is None else None

    def events() -> Iterator[bytes]:
        try:
            yield from pieces(job, answers, tokens_together, loan)
            yield end()
        except InferenceError as error:
            error.__traceback__ = None  # it would keep these frames, and they it, until the next GC
            job.cancel(error)
            yield event(errors.content(errors.from_inference(error)), space)
        except OSError:  # of the client's socket: whoever serves it knows what to do
            raise
        except Exception:
            log.exception("a stream failed")
            job.cancel()
            failed = ApiError("internal error on this request. Try another request", type="server_error")
            yield event(errors.content(failed), space)

    response = Response(stream_with_context(events()), content_type="text/event-stream; charset=utf-8")
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"
    if g.get("context") is None:  # otherwise the request context ends it, even if the generator never starts
        response.call_on_close(job.cancel)
    return response


def _loan(job: Generation, answers: Answers) -> LentSocket | None:
    """Return what lets the writer write this answer; None where only its handler can."""
    sock = bare_socket()
    if sock is None:
        return None
    service: Service = current_app.extensions["service"]
    assert job.wakeup is not None
    return LentSocket(service.stream_writer, sock, job.wakeup, answers)


def bare_socket() -> socket.socket | None:
    """Return the socket of this request, if what gunicorn writes to it is chunks in the clear: HTTP/1.1 without TLS."""
    sock = request.environ.get("gunicorn.socket")
    if type(sock) is not socket.socket or request.environ["SERVER_PROTOCOL"] != "HTTP/1.1":
        return None
    return sock


def event(value: Any, space: bytes = b" ") -> bytes:
    """Return one event whose data is JSON."""
    return b"data:" + space + dumps(value).encode() + b"\n\n"
