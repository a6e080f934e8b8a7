"""What every request passes before a route sees it: hosts, other sites' pages, bodies that break off or never end."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from calls import service
from flask import Flask
from flask.testing import FlaskClient

from app import create_app
from config import Config
from tests.support.fakes import places_taken


@pytest.fixture(scope="module")
def shared_app() -> Flask:
    return create_app(Config(trusted_hosts="llm.example.org, .inside.example", api_key="k"))


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    client = app.test_client()
    client.environ_base["HTTP_AUTHORIZATION"] = "Bearer k"
    return client


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("llm.example.org", 200), ("llm.example.org:8500", 200), ("a.inside.example", 200),
        ("localhost:8500", 200), ("127.0.0.1:8500", 200),
        ("evil.example", 400), ("llm.example.org.evil.example", 400), ("127.0.0.1.evil.example", 400),
        ("xllm.example.org", 400), ("", 400), ("a b", 400),
    ],
)  # fmt: skip
def test_only_trusted_hosts_are_answered_where_they_are_named(client: FlaskClient, host: str, status: int) -> None:
    for path in ("/stats", "/health", "/"):
        reply = client.get(path, headers={"Host": host})
        assert reply.status_code == status, path
        assert status == 200 or "--trusted-hosts" in reply.get_json()["error"]["message"]


def test_only_local_names_are_answered_on_loopback_where_none_is_named() -> None:
    anywhere = create_app(Config()).test_client()
    assert anywhere.get("/health/live", headers={"Host": "evil.example"}).status_code == 200
    client = create_app(Config(host="127.0.0.1")).test_client()
    for host, status in [
        ("localhost", 200), ("a.localhost:8500", 200), ("127.0.0.1:8500", 200), ("[::1]:8500", 200), ("llm.example.org", 400),
        ("localhost.evil.example", 400), ("evil-localhost", 400),
    ]:  # fmt: skip
        reply = client.get("/health/live", headers={"Host": host})
        assert reply.status_code == status, host
        assert status == 200 or "--trusted-hosts" in reply.get_json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/inference"),
        ("POST", "/v1/completions"),
        ("POST", "/generate"),
        ("PUT", "/policy"),
        ("DELETE", "/requests/x"),
    ],
)
def test_what_changes_something_is_refused_from_pages_of_other_sites(
    client: FlaskClient, method: str, path: str
) -> None:
    for content_type in ("application/json", "text/plain"):
        reply = client.open(
            path, method=method, content_type=content_type, data=b"{}", headers={"Sec-Fetch-Site": "cross-site"}
        )
        assert reply.status_code == 403
        assert not [name for name in dict(reply.headers) if name.startswith("Access-Control")]


def test_pages_may_load_nothing_from_elsewhere(client: FlaskClient) -> None:
    for path in ("/", "/race", "/web/live.js", "/docs"):
        policy = client.get(path, headers={"Accept": "text/html"}).headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; "), path
        sources = policy.replace("http://127.0.0.1:*", "").replace("http://localhost:*", "")
        assert "http" not in sources
        assert "*" not in sources


def test_who_asks_is_the_peer_and_not_what_a_header_says(app: Flask, client: FlaskClient) -> None:
    service(app).serves = True
    lines: list[dict[str, Any]] = []
    service(app).access_log.write = lines.append  # type: ignore[method-assign, assignment]
    spoofed = {"X-Forwarded-For": "6.6.6.6", "X-Real-IP": "6.6.6.6", "Forwarded": "for=6.6.6.6"}
    client.get("/stats", headers=spoofed)
    assert [line["client"] for line in lines] == ["127.0.0.1"]


class Broken(io.RawIOBase):
    """A body that ends in an exception, as gunicorn's does."""

    def __init__(self, error: Exception) -> None:
        self.parts = iter([b'{"prompt": "x", '])
        self.error = error

    def read(self, size: int = -1) -> bytes:
        for part in self.parts:
            return part
        raise self.error


@pytest.mark.parametrize(
    ("make", "status", "words"),
    [
        (lambda: Broken(BlockingIOError(11, "again")), 408, "--receive-timeout"),
        (lambda: Broken(ConnectionResetError(104, "reset")), 400, "Content-Length"),
        (lambda: Broken(Exception("Invalid chunk size: b'zz'")), 400, "chunks are malformed"),
        (lambda: io.BytesIO(b'{"prompt": "x"'), 400, "ended after 14 of 99 bytes"),
    ],
)
def test_a_body_that_stalls_breaks_off_or_is_cut_is_the_clients_fault_and_its_place_is_free_again(
    app: Flask, client: FlaskClient, make: Callable[[], Any], status: int, words: str
) -> None:
    environ = {"wsgi.input": make(), "wsgi.input_terminated": True, "CONTENT_LENGTH": "99"}
    reply = client.post("/inference", environ_overrides=environ)
    assert reply.status_code == status
    assert words in reply.get_json()["error"]["message"]
    assert places_taken(app) == 0
