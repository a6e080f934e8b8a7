"""The lab's files, where tools/build_lab.sh has put them, under headers that isolate its page.

The lab runs a user's policy in a worker, and perhaps a stranger's, from a link. Its content policy allows WebAssembly but no
JavaScript from text, and connects to no address but those of the lab: the routes of the server are not among them. This
module must not know what the files are.
"""

from __future__ import annotations

import re

from flask import Blueprint, Response, request

from api.http.errors import ApiError
from api.http.openapi import Operation
from api.pages.dashboard import file_in
from api.service import Service
from config import LAB_FOLDER

POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self' data:; "
    "connect-src {address}; worker-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HOST = re.compile(r"[A-Za-z0-9.-]+(:\d+)?|\[[0-9a-f:]+\](:\d+)?")
ISOLATED = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}
OPERATIONS = [
    Operation("get", "/lab/", "a page on which policies are written and raced", "live page", media="text/html",
              answer={"type": "string"}, errors=(404,)),
    Operation("get", "/lab/{name}", "a file of the lab, with --lab", "live page", media="*/*", answer={"type": "string"},
              errors=(404,)),
]  # fmt: skip


def blueprint(service: Service) -> Blueprint:
    """Return the routes of the lab's files."""
    routes = Blueprint("lab", __name__)

    @routes.get("/lab/")
    def page() -> Response:
        return asset("index.html")

    @routes.get("/lab/<path:name>")
    def asset(name: str) -> Response:
        if not service.config.lab:
            raise ApiError("this server does not serve the lab. Start it with --lab", type="not_found_error")
        address = f"{request.host}/lab/" if HOST.fullmatch(request.host) else "'self'"
        response = file_in(LAB_FOLDER, name, POLICY.format(address=address))
        response.headers.update(ISOLATED)
        return response

    return routes
