"""Server-sent events: the data of each event, from bytes that are cut anywhere. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Events:
    """Splits a stream of bytes into the data of its events, whose lines end with CR, LF or both.

    `name` is the name of the event that came last, "" if it has none.
    """

    def __init__(self) -> None:
        self.name = self._next_name = ""
        self._rest = b""
        self._lines: list[bytes] = []  # of the data of an event that has not ended
        self._after_cr = False

    def cut(self, received: bytes) -> Iterator[bytes]:
        """Yield the data of each complete event; skip comments."""
        if self._after_cr and received:
            received = received.removeprefix(b"\n")
            self._after_cr = False
        if not received:
            return
        self._after_cr = received.endswith(b"\r")
        received = self._rest + received
        lines = received.splitlines()
        self._rest = b"" if received.endswith((b"\n", b"\r")) else lines.pop()
        for line in lines:
            line = line.removeprefix(BYTE_ORDER_MARK)
            if line.startswith(b"data:"):
                if self._is_whole():
                    yield self._take()
                self._lines.append(line[5:].strip())
            elif line.startswith(b"event:"):
                self._next_name = line[6:].strip().decode("utf-8", "replace")
            elif self._lines and not line:
                yield self._take()
        if self._is_whole():
            yield self._take()

    def end(self) -> Iterator[bytes]:
        """Yield the data that the end of the stream completes."""
        yield from self.cut(b"\n")
        if self._lines:
            yield self._take()

    def _take(self) -> bytes:
        data, self._lines = b"\n".join(self._lines), []
        self.name, self._next_name = self._next_name, ""
        return data

    def _is_whole(self) -> bool:
        """Return whether there is data that is complete although no blank line ended it, as some servers send it."""
        if not self._lines:
            return False
        data = b"\n".join(self._lines)
        return data == b"[DONE]" or (data.endswith(b"}") and read_json(data) is not None)


def read_json(data: bytes | str) -> Any:
    """Parse JSON; return None if it is not valid."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
