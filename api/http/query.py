"""The query string: parameters that no route reads are listed in X-Ignored-Params, like fields of a body."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flask import Response, request

from api.http import body
from api.http.auth import PAGES
from api.http.openapi import Operation


def name_unread(operations: Sequence[Operation]) -> Callable[[Response], Response]:
    """Return what to do with each answer; scripts of a page may read what its route does not."""
    read = {op.path: op.query for op in operations}

    def after_request(response: Response) -> Response:
        if not request.environ.get("QUERY_STRING") or request.url_rule is None or response.status_code >= 400:
            return response
        if request.endpoint in PAGES or response.mimetype == "text/html":
            return response
        unread = [name for name in request.args if name not in read.get(request.path, ())]
        named = response.headers.get("X-Ignored-Params")
        return body.name_ignored(response, [named, *unread] if named else unread)

    return after_request
