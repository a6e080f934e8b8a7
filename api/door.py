"""The door: what every request passes before a route sees it, and what every answer carries out."""

from __future__ import annotations

import re
import uuid

from flask import Response, g, request
from werkzeug.exceptions import NotFound

from api.errors import ApiError

ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def enter() -> None:
    """Give the request an id, the client's own if it is one, and refuse what another site's page sends."""
    given = request.headers.get("X-Request-Id", "")
    g.request_id = given if ID.fullmatch(given) else uuid.uuid4().hex
    if request.environ["PATH_INFO"].startswith("//"):
        raise NotFound  # flask itself would read it as one slash
    if request.method == "POST" and request.headers.get("Sec-Fetch-Site") == "cross-site":
        raise ApiError(
            "a page of another site sent this request. Use a client that is no browser, or a page "
            "of this server's own address",
            type="permission_error",
        )


def leave(response: Response) -> Response:
    """Send the request's id back."""
    response.headers["X-Request-Id"] = g.request_id
    return response
