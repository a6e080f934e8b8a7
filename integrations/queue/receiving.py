"""Reads the body of a request within limits of size and time. A body that its head rules out is never read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

from api.http.errors import ApiError, shown
from routing import bodies
from serving.places import Place

RETRY_SECONDS = 5  # for other requests to end


class Limits(NamedTuple):
    """The limits on clients: seconds for each part of a request, and the number of connections."""

    receive: float  # for a head from its first byte, and between two reads of a body
    send: float  # in which a client reads nothing of its answer
    connections: int
    idle: float = 75.0  # between two requests, as in launch/gunicorn_conf.py
    body: float = 60.0  # for a whole body


class ClientLeft(Exception):
    """The client has closed its connection."""


class Room(Place):
    """The bytes that one request holds, of those that all may hold together."""

    def take(self, count: int) -> None:
        """Hold so many more bytes; ApiError if there are not as many."""
        if not self.take_more(count):
            text = f"the waiting requests hold too many bytes (limit {self._places.limit:,}). Try again later, or raise --max-queue-bytes"
            raise ApiError(text, type="overloaded", retry_after=RETRY_SECONDS)


async def receive(
    request: web.BaseRequest, limits: Limits, most: int = bodies.LARGEST, *, encoded: bool = False,
    take: Callable[[int], object] = int,
) -> bytes:  # fmt: skip
    """Return the body as it was sent; ApiError if it is larger than `most`, too slow, truncated, or compressed.

    With `encoded` it may be compressed. `take` is told the bytes of each piece, and may refuse them.
    """
    if not request.body_exists:
        return b""
    _check(request, most, encoded)
    if request.version == HttpVersion11 and "Expect" in request.headers:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # of the answer so far
    try:
        return await _read(request, limits, most, take)
    except asyncio.TimeoutError:
        text = (
            f"timed out while reading the body, which may take {limits.body:g} s, and {limits.receive:g} s between two "
            "reads. Send it without pauses, or raise --receive-timeout"
        )
        raise ApiError(text, type="timeout_error", status=408) from None
    except (web.RequestPayloadError, HttpProcessingError):
        request.content.feed_eof()  # aiohttp would read on
        text = "the body is truncated, or its chunks are malformed. Send the complete body with its Content-Length"
        raise ApiError(text) from None
    except ConnectionError:
        raise ClientLeft from None


def _check(request: web.BaseRequest, most: int, encoded: bool) -> None:
    """Raise ApiError for a body that the head alone rules out."""
    coding = ",".join(request.headers.getall("Transfer-Encoding", ())).strip()
    if coding and coding.lower() != "chunked":
        raise ApiError(f"Unsupported transfer coding: {shown(coding)}. Send a plain HTTP/1.1 request", status=501)
    if coding and request.version < HttpVersion11:  # whose recipients may ignore it
        raise ApiError("HTTP/1.0 has no chunks. Send a Content-Length, or HTTP/1.1")
    encoding = ",".join(request.headers.getall("Content-Encoding", ())).strip()
    if encoding.lower() not in ("", "identity") and not encoded:
        text = f"Content-Encoding {shown(encoding)} is not supported. Send the body as plain, uncompressed JSON"
        raise ApiError(text, status=415)
    if (request.content_length or 0) > most:
        raise _too_large(most)


async def _read(request: web.BaseRequest, limits: Limits, most: int, take: Callable[[int], object]) -> bytes:
    loop, content, body = asyncio.get_running_loop(), request.content, bytearray()
    end = loop.time() + limits.body
    while not content.at_eof():
        if content.is_eof():  # nothing to wait for
            piece = content.read_nowait()
        else:
            piece = await asyncio.wait_for(content.readany(), min(limits.receive, end - loop.time()))
        take(len(piece))
        body += piece
        if len(body) > most:
            raise _too_large(most)
    return bytes(body)


def _too_large(most: int) -> ApiError:
    return ApiError(f"the body is larger than {most:,} bytes. Send a shorter prompt", status=413)
