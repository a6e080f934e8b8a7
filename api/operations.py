"""Looking in: whether the process answers, whether the loop is alive, who is served."""

from __future__ import annotations

from flask import Blueprint, Response, jsonify

from api.service import Service


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("operations", __name__)

    def health() -> Response:
        status, reason = service.status()
        engine = service.engine
        body: dict[str, object] = {"status": status, "policy": service.config.policy}
        if reason:
            body["reason"] = reason
        if engine is not None:
            body["model"] = engine.model_name
        age = service.beat_age()
        body["last_iteration_age_s"] = None if age is None else round(age, 3)
        result = jsonify(body)
        if status != "ok":
            result.status_code = 503
            result.headers["Retry-After"] = "1"
        return result

    for path in ("/health", "/healthz", "/ping", "/ready", "/health/ready"):
        routes.add_url_rule(path, endpoint=path.strip("/").replace("/", "_"), view_func=health)

    @routes.get("/health/live")
    def live() -> Response:
        return jsonify(status="ok")

    @routes.get("/")
    def home() -> Response:
        return health()

    return routes
