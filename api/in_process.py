"""Requests of the server to itself: the lines of batches, computed as background work by the routes that clients use.

They pass through all checks except the key and the queue's places. No client can send one: the mark is in the
WSGI environment, beside the headers. This module must not know what a batch is.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from werkzeug.test import EnvironBuilder

from api.http.deferral import App, DeferredRequest
from api.http.errors import ApiError
from api.http.owner import BACKGROUND
from api.schemas import body
from api.service import Service
from batch_files.lines import EXAMPLE, Line
from batch_files.runner import Done

THREADS = 4  # that tokenize, or write an answer too large for the thread that sends all others


def read_line(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a line, counted before it is built as every body is; raise ValueError."""
    try:
        return body.parse(data, EXAMPLE)
    except ApiError as error:
        raise ValueError(str(error)) from None


class InProcess:
    """Sends the lines of batches to an app."""

    def __init__(self, app: App, service: Service) -> None:
        self._app = app
        self._service = service
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="batch-line")

    def send(self, line: Line, owner: str, id: str, done: Done) -> None:
        """Have a line computed for its owner; call `done` with status, id and body of its answer."""
        self._threads.submit(self._begin, line, owner, id, done)

    def cancel(self, id: str) -> None:
        """Cancel the line that was sent with this id."""
        self._service.registry.cancel(id)

    def _begin(self, line: Line, owner: str, id: str, done: Done) -> None:
        sent = EnvironBuilder(
            line.url, method="POST", data=_encoded(line.body), content_type="application/json",
            headers=[("X-Request-Id", id)],
        )  # fmt: skip
        environ = {**sent.get_environ(), BACKGROUND: owner}
        sent.close()
        head: dict[str, Any] = {"X-Request-Id": id}  # of the answer

        def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> None:
            head.update(headers, status=int(status.split(" ", 1)[0]))

        def finish() -> None:
            try:
                body = exchange.answer(b"".join)
            except Exception as error:
                fail(error)
                return
            done(head["status"], head["X-Request-Id"], body)

        def fail(error: Exception) -> None:
            message = f"internal error on this request: {type(error).__name__}"
            content = {"error": {"message": message, "type": "server_error", "param": None, "code": None}}
            done(500, head["X-Request-Id"], json.dumps(content).encode())

        exchange = DeferredRequest(self._app, environ, start)
        try:
            work = exchange.begin()
            if work is not None:
                self._service.completer.wait(work, finish)
                return
        except Exception as error:
            fail(error)
            return
        finish()


def _encoded(fields: dict[str, Any]) -> bytes:
    """Return an object as JSON that is no longer than in its line, where that was short enough for a body."""
    try:
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(fields, separators=(",", ":")).encode()
