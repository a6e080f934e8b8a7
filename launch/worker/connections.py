"""Sockets of clients: how long they may block a thread, how responses are sent, and how connections are closed.

This module must not know the worker's threads and queues.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import selectors
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

from gunicorn import util
from gunicorn.http.parser import RequestParser
from gunicorn.workers.gthread import TConn

LINGER_SECONDS = 5.0  # for a client to read its last response and close
LIMITS_ARE_INHERITED = sys.platform == "linux"  # by connections from their listener, without a call for each
PLAIN_BYTES, PLAIN_FIELDS = 8000, 50  # within gunicorn's limits
PLAIN = re.compile(rb"POST (/[A-Za-z0-9/_]{0,99}) HTTP/1\.1\r\n((?:[A-Za-z0-9-]+:[ -~]*\r\n)+)\r\n(.*)", re.DOTALL)
# Fields that change how a request is read or answered; the last three say the scheme, and can contradict each other.
UNUSUAL = {"EXPECT", "TRANSFER-ENCODING", "UPGRADE", "X-FORWARDED-PROTOCOL", "X-FORWARDED-PROTO", "X-FORWARDED-SSL"}
MAX_REASON = 200  # characters of gunicorn's message


def limit_blocking(sock: socket.socket, receive: float, send: float) -> None:
    """Limit in seconds how long a read or a write of a connection, or of those that a listener accepts, may block.

    gunicorn reads and writes in blocking mode; a client that is too slow raises BlockingIOError.
    """
    for option, seconds in ((socket.SO_RCVTIMEO, receive), (socket.SO_SNDTIMEO, send)):
        whole, rest = divmod(seconds, 1)
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(whole), int(rest * 1e6)))


def is_plain(cfg: Any) -> bool:
    """Whether connections have HTTP/1.1, and nothing around it."""
    return not (cfg.is_ssl or "h2" in cfg.http_protocols or cfg.protocol != "http")


class PlainRequest:
    """A POST that has wholly arrived, with the attributes of gunicorn's requests; it does not end its connection."""

    method, version, scheme, query = "POST", (1, 1), "http", ""
    proxy_protocol_info, _expected_100_continue, should_close = None, False, bool  # bool() is False

    def __init__(self, path: str, headers: list[tuple[str, str]], body: bytes) -> None:
        self.path = self.uri = path
        self.headers = headers
        self.body = io.BytesIO(body)


def plain_request(data: bytes) -> PlainRequest | None:
    """Return the request in these bytes; None unless it is whole, and so plain that all parsers read it alike."""
    match = PLAIN.fullmatch(data) if len(data) < PLAIN_BYTES else None
    if match is None:
        return None
    pairs = [line.split(":", 1) for line in match[2].decode("latin-1").split("\r\n")[:-1]]
    headers = [(name.upper(), value.strip(" ")) for name, value in pairs]
    fields = dict(headers)
    is_plain = len(fields) == len(pairs) <= PLAIN_FIELDS and UNUSUAL.isdisjoint(fields)
    if not is_plain or fields.get("CONTENT-LENGTH") != str(len(match[3])):
        return None
    if fields.get("CONNECTION", "keep-alive").lower() != "keep-alive":
        return None
    return PlainRequest(match[1].decode(), headers, match[3])


class Parser(RequestParser):  # type: ignore[misc]
    """gunicorn's parser, except that a plain request that has wholly arrived is read at once, by one pattern."""

    def arrived(self) -> bytes:
        """Return what has arrived of the next request, up to `PLAIN_BYTES`; it is read once, and kept until it is parsed."""
        if not (data := self.unreader.buf.getvalue()):
            with contextlib.suppress(OSError):
                data = self.unreader.sock.recv(PLAIN_BYTES, socket.MSG_DONTWAIT)
                self.unreader.unread(data)
        return bytes(data)

    def __next__(self) -> Any:
        plain = plain_request(self.arrived())
        if plain is None:
            return super().__next__()
        self.unreader.take_buffered()
        self.req_count += 1
        self.mesg = plain
        return plain

    def finish_body(self, *args: Any, **options: Any) -> bool:
        return isinstance(self.mesg, PlainRequest) or bool(super().finish_body(*args, **options))


def head_of(resp: Any) -> bytes:
    """Return the head of a response, which the caller sends."""
    resp.headers_sent = True
    headers = "".join(f"{name}: {value}\r\n" for name, value in resp.headers)
    return "".join([*resp.default_headers(), headers, "\r\n"]).encode("latin-1")


def send_response(resp: Any, pieces: Iterable[bytes]) -> bytes:
    """Send a response: one without a length to its end, any other as far as the socket accepts it. Return the rest."""
    if resp.response_length is None:
        for piece in pieces:
            resp.write(piece)
        resp.close()
        return b""
    message = b"".join([head_of(resp), *pieces])  # in one packet, where it fits
    try:
        return message[resp.sock.send(message, socket.MSG_DONTWAIT) :]
    except BlockingIOError:
        return message


_date_of = lru_cache(maxsize=1)(util.http_date)


def http_date(timestamp: float | None = None) -> str:
    """Return a moment, by default now, as the header Date has it; it is written once a second."""
    return str(_date_of(int(time.time() if timestamp is None else timestamp)))


def write_error(client: socket.socket, status: int, reason: str, message: str) -> None:
    """Answer a request that gunicorn could not parse, in the JSON format of the app's errors."""
    shown = message if len(message) <= MAX_REASON else f"{message[: MAX_REASON - 1]}…"
    error = {
        "message": f"{shown or reason}. Send a plain HTTP/1.1 request",
        "type": "server_error" if status == 500 else "invalid_request_error",
        "param": None,
        "code": None,
    }
    body = json.dumps({"error": error}).encode()
    head = (
        f"HTTP/1.1 {status} {reason}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    util.write_nonblock(client, head.encode() + body)


class ClosingConnections:
    """Connections with a last response, each open until the client closes it or LINGER_SECONDS have passed.

    To close at once while the client still sends would reset the connection, and the client would lose the response.
    """

    def __init__(self, on_close: Callable[[], None]) -> None:
        self._on_close = on_close
        self._conns: deque[TConn] = deque()

    def __len__(self) -> int:
        return len(self._conns)

    def add(self, poller: selectors.BaseSelector, conn: TConn) -> None:
        """Close the sending half, and read and discard until the client closes its own."""
        try:
            conn.sock.setblocking(False)
            conn.sock.shutdown(socket.SHUT_WR)
        except OSError:  # the client has disconnected
            self._close(conn)
            return
        conn.timeout = time.monotonic() + LINGER_SECONDS
        self._conns.append(conn)
        poller.register(conn.sock, selectors.EVENT_READ, partial(self._discard, poller, conn))

    def expire(self, poller: selectors.BaseSelector, now: float) -> None:
        """Close the connections whose time is up."""
        while self._conns and self._conns[0].timeout <= now:
            self.close_oldest(poller)

    def close_oldest(self, poller: selectors.BaseSelector) -> None:
        conn = self._conns.popleft()
        poller.unregister(conn.sock)
        self._close(conn)

    def _discard(self, poller: selectors.BaseSelector, conn: TConn, client: socket.socket) -> None:
        try:
            data = client.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:  # reset
            data = b""
        if not data:
            self._conns.remove(conn)
            poller.unregister(client)
            self._close(conn)

    def _close(self, conn: TConn) -> None:
        self._on_close()
        conn.close()
