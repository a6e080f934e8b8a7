"""The live page: its files, the Markdown of its chat, the button that sends a load to this server, and the lab's files.

A browser that requests `/` gets the page, every other client the answer of /health. Scripts and styles come from `/web/`
under a content policy that lets the page run nothing else and connect to no other host.

The lab runs a user's policy in a worker, and perhaps a stranger's, from a link. Its content policy allows WebAssembly but no
JavaScript from text, and connects to no address but those of the lab: the routes of the server are not among them. Its
files are where dev/tools/build_lab.sh has put them.
"""

from __future__ import annotations

import mimetypes
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from flask import Response, jsonify, request
from werkzeug.exceptions import NotFound
from werkzeug.security import safe_join

from api import generation
from api.http.errors import ApiError
from api.http.openapi import Object, Routes
from api.pages import what_if
from api.pages.demo import Load
from api.schemas import body
from api.schemas.demo import LoadRequest
from api.service import Service
from config import LAB_FOLDER, ROOT

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

WEB = ROOT / "web"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'{others}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
LAB_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self' data:; "
    "connect-src {address}; worker-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HOST = re.compile(r"[A-Za-z0-9.-]+(:\d+)?|\[[0-9a-f:]+\](:\d+)?")
ISOLATED = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}
NEIGHBORS = " http://127.0.0.1:* http://localhost:*"  # servers that race on one machine
EXAMPLE = '{"count": 40, "rate": 4}'
MOST_MARKDOWN = 1 << 13  # bytes: some texts take the parser time that grows with the square of their length


def routes_of(service: Service) -> Routes:
    """Return the routes of the page and of its load."""
    routes = Routes("dashboard", "live page")
    load = service.load = Load()

    @routes.get("/race", "a page that compares runs side by side", answer={"text/html": str})
    def race() -> Response:
        return page("race.html", NEIGHBORS)

    @routes.get("/web/<path:name>", "a file of the live page", answer={"*/*": str}, errors=(404,))
    def asset(name: str) -> Response:
        return file_in(WEB, name, POLICY.format(others=""))

    @routes.post(
        "/web/markdown", "turn Markdown into HTML, as the chat of the live page shows it", answer={"text/html": str},
        errors=(413,),
    )  # fmt: skip
    def markdown() -> Response:
        text = body.read(request)
        if len(text) > MOST_MARKDOWN:
            raise ApiError(f"the text has {len(text):,} bytes, but may have {MOST_MARKDOWN:,}", status=413)
        return Response(_markdown().render(text.decode(errors="replace")), mimetype="text/html")

    @routes.post(
        "/load", "send this server a demonstration load", body=LoadRequest,
        example={"count": 8, "rate": 100, "max_tokens": 4, "min_tokens": 1}, answer=Object, errors=(429, 503),
    )  # fmt: skip
    def start() -> Response:
        params, ignored = body.validate(LoadRequest, body.take(request, EXAMPLE))
        engine = generation.ready_engine(service)
        if service.draining:
            raise ApiError("the server is shutting down, so it starts no load", type="unavailable_error")
        if not load.start(engine, params, service.wants_load):
            raise ApiError(
                f"a load of {load.progress()['total']} requests is already running. Wait until it ends, send DELETE /load, "
                'or replace it with {"replace": true}', type="overloaded", retry_after=5,
            )  # fmt: skip
        return body.name_ignored(jsonify(load.progress()), ignored)

    @routes.get("/load", "progress of the load", answer=Object)
    def progress() -> Response:
        return jsonify(load.progress())

    @routes.delete("/load", "stop sending the load", answer=Object)
    def stop() -> Response:
        load.stop()
        return jsonify(load.progress())

    what_if.install(routes, service)

    @routes.get("/lab/", "a page on which policies are written and raced", answer={"text/html": str}, errors=(404,))
    def lab() -> Response:
        return lab_asset("index.html")

    @routes.get("/lab/<path:name>", "a file of the lab, with --lab", answer={"*/*": str}, errors=(404,))
    def lab_asset(name: str) -> Response:
        if not service.config.lab:
            raise ApiError("this server does not serve the lab. Start it with --lab", type="not_found_error")
        address = f"{request.host}/lab/" if HOST.fullmatch(request.host) else "'self'"
        response = file_in(LAB_FOLDER, name, LAB_POLICY.format(address=address))
        response.headers.update(ISOLATED)
        return response

    return routes


@cache
def _markdown() -> MarkdownIt:
    """Return the renderer, in which HTML is escaped and nothing is loaded from elsewhere. Only a chat pays its import."""
    from markdown_it import MarkdownIt

    return MarkdownIt("js-default").disable("image")


def wants_page() -> bool:
    """Return whether the client of the current request is a browser that wants a page."""
    return request.method in ("GET", "HEAD") and "text/html" in request.headers.get("Accept", "")


def page(name: str = "index.html", others: str = "") -> Response:
    """Return one of the pages."""
    response = file_in(WEB, name, POLICY.format(others=others))
    response.headers["Vary"] = "Accept"
    return response


def file_in(folder: Path, name: str, policy: str) -> Response:
    """Return a file of a page, which may do what its content policy allows; NotFound if the folder has no such file."""
    path = safe_join(str(folder), name)
    if path is None or not Path(path).is_file():
        raise NotFound
    response = Response(Path(path).read_bytes(), mimetype=mimetypes.guess_type(name)[0] or "text/plain")
    headers = response.headers
    headers["Cache-Control"] = "no-cache"  # revalidate each time: another version may be served
    headers["Content-Security-Policy"] = policy
    headers["X-Content-Type-Options"] = "nosniff"
    headers["Referrer-Policy"] = "no-referrer"
    headers["Cross-Origin-Resource-Policy"] = "same-origin"
    response.add_etag()
    response.make_conditional(request)
    return response
