"""GET /openapi.json, and a page that shows it in plain HTML, without scripts and other hosts."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from flask import Response, jsonify

from api.hooks.admission import OPEN
from api.http.openapi import Object, Routes, document
from api.schemas.openai import ChatRequest, CompletionRequest
from api.service import Service
from config import VERSION

STYLE = """
:root{color-scheme:light dark}a{color:#0a5fb4}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
summary{cursor:pointer;padding:.3rem 0}b{display:inline-block;width:4.5rem;text-transform:uppercase}
code,pre{font:13px/1.4 ui-monospace,monospace}pre{background:#f4f4f4;padding:.7rem;overflow:auto}
table{border-collapse:collapse}td,th{text-align:left;padding:.15rem .8rem .15rem 0;vertical-align:top}
@media(prefers-color-scheme:dark){a{color:#7ab7ff}body{color:#ddd;background:#161616}pre{background:#242424}}
"""


def routes_of(service: Service) -> Routes:
    """Return the routes."""
    routes = Routes("docs", "docs")

    def described() -> dict[str, Any]:
        engine = service.engine
        limits = {} if engine is None else {"context": engine.context, "vocabulary": engine.vocabulary}
        result = document(service.operations, VERSION, OPEN, bool(service.config.api_key), limits)
        for schema in (CompletionRequest, ChatRequest):
            fields = result["components"]["schemas"][schema.__name__]["properties"]
            for name, value in ({} if engine is None else engine.sampling).items():
                fields[name]["default"] = value
        return result

    @routes.get("/openapi.json", "this document", answer=Object)
    def openapi() -> Response:
        return jsonify(described())

    @routes.get("/docs", "this page", answer={"text/html": str})
    def docs() -> Response:
        reply = Response(page(described()), mimetype="text/html")
        reply.headers["Content-Security-Policy"] = "default-src 'none'; style-src 'unsafe-inline'"
        return reply

    return routes


def page(document: dict[str, Any]) -> str:
    """Return the document as HTML, its operations by tag."""
    by_tag: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            text = _operation(path, method, operation, document["components"]["schemas"])
            by_tag.setdefault(operation["tags"][0], []).append(text)
    parts = [f"<h2>{escape(tag)}</h2>{''.join(texts)}" for tag, texts in by_tag.items()]
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body><h1>{title}</h1>'
        f'<p>For programs: <a href="openapi.json">openapi.json</a>. Fields marked * are required.</p>'
        f"{''.join(parts)}</body></html>\n"
    )


def _operation(path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{code}</td><td>{escape(reply['description'])}</td></tr>"
        for code, reply in operation["responses"].items()
    )
    body = ""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content:
        body = _fields(schemas[content["schema"]["$ref"].rpartition("/")[2]])
        if "example" in content:
            body += f"<pre>{escape(json.dumps(content['example'], indent=2))}</pre>"
    return (
        f"<details><summary><b>{method}</b> <code>{escape(path)}</code> {escape(operation['summary'])}</summary>"
        f"{body}<table>{rows}</table></details>"
    )


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    refused = ", ".join(f"<code>{escape(name)}</code>" for name in schema.get("x-unsupported", ()))
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code>{' *' if name in required else ''}</td>"
        f"<td>{escape(field.get('description', ''))}</td>"
        f"<td>{escape(json.dumps(field['default'])) if field.get('default') is not None else ''}</td></tr>"
        for name, field in sorted(schema.get("properties", {}).items(), key=lambda item: item[0] not in required)
    )
    table = f"<table><tr><th>field</th><th>send</th><th>default</th></tr>{rows}</table>" if rows else ""
    return table + (f"<p>Not supported, unless their value changes nothing: {refused}</p>" if refused else "")
