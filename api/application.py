"""What every Flask app of this project has in common: its hooks, its errors, its JSON, and the recorders of its loop."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

from flask import Flask, Response
from flask.json.provider import DefaultJSONProvider
from werkzeug.exceptions import HTTPException

from api.admin import policy
from api.hooks import admission, middleware
from api.http import errors
from api.http.deferral import App
from api.service import LoadedEngine, Service
from batching import InferenceError
from observe.served import ServedLog
from serving.headroom import NO_MEMORY

log = logging.getLogger("effective-batching")


def assemble(app: App, service: Service, modules: Iterable[Any]) -> None:
    """Give an app the hooks, and the routes of these modules."""
    app.url_map.merge_slashes = False  # do not redirect paths with double slashes
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False  # OPTIONS is a method of CORS alone
    app.json = Json(app)
    app.extensions["service"] = service
    routes = [module.routes_of(service) for module in modules]
    service.operations = [operation for some in routes for operation in some.operations]
    app.before_request(admission.admit(service))
    app.after_request(middleware.leave(service))
    app.teardown_request(middleware.abandon(service))
    for some in routes:
        app.register_blueprint(some.blueprint)
    app.register_error_handler(errors.ApiError, errors.response)
    app.register_error_handler(InferenceError, lambda e: errors.response(errors.from_inference(e)))
    app.register_error_handler(HTTPException, lambda e: errors.response(errors.from_http(e)))
    app.register_error_handler(MemoryError, _out_of_memory)
    app.register_error_handler(Exception, _unexpected)


def connect(service: Service, engine: LoadedEngine) -> None:
    """Serve with this engine: set its time limits, and connect its loop to all recorders of requests and steps."""
    manager = engine.manager
    manager.deadlines.queue_timeout = service.config.queue_limit
    manager.deadlines.request_timeout = service.config.request_timeout
    service.served = served = ServedLog(lambda: manager.policy_name)
    manager.listeners += [
        service.registry.on_arrival, service.meters.on_arrival, service.feed.on_arrival, served.on_arrival,
    ]  # fmt: skip
    manager.on_leave.append(service.registry.observe)
    manager.observers += [service.meters.observe, service.feed.observe, service.socket_writer.observe, served.observe]
    manager.fallback.listeners.append(lambda: policy.announce(service, engine))
    service.registry.waited = manager.waited
    # Last: handlers that see an engine rely on all that was set before.
    service.engine = engine
    if service.batches is not None:
        service.batches.start()


class Json(DefaultJSONProvider):
    """Compact JSON with keys in insertion order, and without NaN, which is not valid JSON."""

    def __init__(self, app: Flask) -> None:
        super().__init__(app)
        self._encode = json.JSONEncoder(default=self.default, allow_nan=False, separators=(",", ":")).encode

    def dumps(self, obj: Any, **options: Any) -> str:
        return self._encode(obj)

    def response(self, *args: Any, **kwargs: Any) -> Response:
        obj = self._prepare_response_obj(args, kwargs)
        return Response(self._encode(obj) + "\n", content_type="application/json")


def _out_of_memory(error: MemoryError) -> Any:
    log.error("a request handler ran out of memory")
    return errors.response(errors.ApiError(NO_MEMORY, type="out_of_memory", code="out_of_memory"))


def _unexpected(error: Exception) -> Any:
    log.exception("a request handler failed")
    return errors.response(errors.ApiError("internal error on this request. Try another request", type="server_error"))
