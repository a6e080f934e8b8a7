"""Answers that are read while they grow: who has new text, and the frames of server-sent events.

The loop rings the job's bell at most once a step, and ringing costs it time. So a reader that has just sent something
sleeps out the time in which tokens are put together before it listens again, if steps are so fast that there will be
some by then: many streams of fast steps cost the loop nothing.
It must not know what a dialect's events look like.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from flask import Response, g, stream_with_context

from api import errors
from api.errors import ApiError
from api.generation import Job
from batching import Inference, InferenceError
from inference import LOOK_SECONDS, too_late

log = logging.getLogger(__name__)

INTERVAL = 0.020  # seconds for which tokens may be put together
SILENCE = 10.0  # seconds after which a comment shows that the server is there
PING = b": ping\n\n"


class Growth(NamedTuple):
    """What one answer has more than before: text, tokens start..stop of it, and whether it has ended."""

    index: int
    text: str
    start: int
    stop: int
    ended: bool


class Follower:
    """Reads one answer; with `every_token` it also tells of tokens that add no text."""

    def __init__(
        self, index: int, inference: Inference, *, scored: bool, every_token: bool
    ) -> None:
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

    def look(self) -> Growth | None:
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
        return Growth(self.index, text, start, stop, False)

    def _end(self) -> Growth:
        if self.inference.error is not None:
            raise self.inference.error
        self.done = True
        count = len(self.inference.output_ids)
        return Growth(self.index, self._text.rest(self.inference.answer), self._told, count, True)


def rounds(
    job: Job, followers: list[Follower], tokens_together: int | None = None
) -> Iterator[list[Growth]]:
    """Yield what has grown, again and again until all have ended; nothing after `SILENCE` seconds without any.

    With `tokens_together` so many tokens make a round, instead of those of `INTERVAL`.
    """
    bell, limit, own = job.bell, job.limit, job.own_limit
    assert bell is not None
    live = list(followers)
    sent_at, pinged_at = -INTERVAL, time.perf_counter()
    gap = INTERVAL  # seconds between tokens, as far as is known
    while live:
        left = INTERVAL - (time.perf_counter() - sent_at)
        if left > 0 and tokens_together is None and (gap < INTERVAL or any(f.unread for f in live)):
            bell.wants_tokens = False
            bell.wait(left)  # an ending rings all the same
        bell.wants_tokens = True
        most = max([f.unread for f in live])
        grown = [] if _too_few(live, tokens_together) else _look(live)
        if grown:
            bell.wants_tokens = False
            live = [f for f in live if not f.done]
            yield grown
            now = time.perf_counter()
            gap, sent_at, pinged_at = (now - sent_at) / (most or 1), now, now
            continue
        now = time.perf_counter()
        if own is not None and now - job.arrived_at >= own:
            job.end_early()
            own = None
        elif now - job.arrived_at >= limit:
            job.cancel(too_late(limit))
        elif now - pinged_at >= SILENCE:
            pinged_at = now
            yield []
        else:
            ends = [pinged_at + SILENCE, job.arrived_at + (limit if own is None else own)]
            bell.wait(min(min(ends) - now, LOOK_SECONDS))
            for follower in live:
                follower.inference.look_after()


def _look(live: list[Follower]) -> list[Growth]:
    return [growth for follower in live if (growth := follower.look()) is not None]


def _too_few(live: list[Follower], together: int | None) -> bool:
    """Whether to wait for more tokens; the first of an answer and its end wait for nothing."""
    if together is None:
        return False
    return not any(
        f.inference.is_finished or f.unread >= together or (f.is_fresh and f.unread) for f in live
    )


def respond(
    job: Job,
    followers: list[Follower],
    encode: Callable[[Growth], bytes],
    end: Callable[[], bytes],
    *,
    space: bytes = b" ",
    tokens_together: int | None = None,
) -> Response:
    """Return the response that streams a job's events; leaving it early cancels what has not ended."""

    def events() -> Iterator[bytes]:
        try:
            for grown in rounds(job, followers, tokens_together):
                yield b"".join(map(encode, grown)) if grown else PING
            yield end()
        except InferenceError as error:
            job.cancel(error)
            yield event(errors.content(errors.from_inference(error)), space)
        except Exception:
            log.exception("a stream failed")
            job.cancel()
            failed = ApiError("the server failed on this request. Try another", type="server_error")
            yield event(errors.content(failed), space)

    response = Response(
        stream_with_context(events()), content_type="text/event-stream; charset=utf-8"
    )
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"
    if (
        g.get("visit") is None
    ):  # else the visit ends what is open, whether the generator began or not
        response.call_on_close(job.cancel)
    return response


dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def event(value: Any, space: bytes = b" ") -> bytes:
    """Return one event whose data is JSON."""
    return b"data:" + space + dumps(value).encode() + b"\n\n"
