"""The refusal of a full server, made before Flask sees the request, and byte for byte what Flask would answer.

Only requests that Flask would surely refuse for this reason are refused here; all others are left to Flask. This module
must not know who reads requests and sends answers.
"""

from __future__ import annotations

import time
from typing import Any

from flask import Flask
from werkzeug.http import HTTP_STATUS_CODES

from api.hooks import admission, cors, middleware
from api.http import errors
from api.service import Service


def refuse(app: Flask, environ: dict[str, Any], start_response: Any) -> bytes | None:
    """Count and log the refusal of a request, start its response, and return the body; None if it may get in."""
    service: Service = app.extensions["service"]
    method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
    if (
        f"{method} {path}" not in service.generating
        or environ["SCRIPT_NAME"]
        or environ.get(admission.PLACE)
        or service.engine is None
        or service.draining
        or not cors.is_trusted(environ.get("HTTP_HOST"), service.hosts)
        or admission.crosses(environ, service.origins)
        or (service.config.api_key and not admission.has_key(environ, service.config.api_key))
    ):
        return None
    inbox = service.engine.manager.inbox
    if inbox.places.taken < inbox.places.limit:
        return None
    state = app.app_ctx_globals_class()
    id = admission.request_id(environ)
    vars(state).update(request_id=id, began=time.perf_counter(), n_ignored=0, generates=True)
    service.meters.arrived()
    state.error = error = errors.from_inference(inbox.full_error(1))
    status, content = errors.written(error, method, path, service.config.overload_status)
    body = app.json.dumps(content).encode() + b"\n"
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers}
    headers |= middleware.id_headers(path, id)
    headers |= cors.headers(service.origins, environ.get("HTTP_ORIGIN"))
    middleware.finish(service, app.request_class(environ), path, status, len(body), state)
    start_response(f"{status} {HTTP_STATUS_CODES.get(status, 'unknown').upper()}", list(headers.items()))
    return body
