"""Routes, methods, other sites and the key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from calls import ask, error
from flask.testing import FlaskClient

from app import create_app
from config import Config

KEY = "s3cret"


def test_looking_in_has_no_side_effect(client: FlaskClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ask(client)
    before = client.get("/stats").get_json()
    for path in ("/stats", "/stats/token_data.csv", "/health"):
        client.get(path)
    after = client.get("/stats").get_json()
    before["engine"].pop("uptime_s")
    after["engine"].pop("uptime_s")
    assert before == after
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["/", "/health", "/healthz", "/ping", "/ready", "/health/ready"])
def test_health_says_who_is_served(client: FlaskClient, path: str) -> None:
    body = client.get(path).get_json()
    assert (body["status"], body["model"], body["policy"]) == ("ok", "fake", "dynamic")
    assert body["last_iteration_age_s"] < 60


@pytest.mark.parametrize(
    "path",
    [
        "/nowhere",
        "//",
        "//inference",
        "/inference/",
        "/%2e%2e/etc/passwd",
        "/static/app",
        "/stats%00",
        "/web/../LICENSE",
        "/web/%2e%2e/LICENSE",
        "/web/..%2fLICENSE",
    ],
)
def test_an_unknown_path_is_404_and_lists_the_known(client: FlaskClient, path: str) -> None:
    refusal = error(
        client.get("/", environ_overrides={"PATH_INFO": path}) if path.startswith("//") else client.get(path), 404
    )
    assert refusal["type"] == "not_found_error"
    assert "/inference" in refusal["message"]


@pytest.mark.parametrize(
    ("path", "nearest"),
    [("//v1/completions", "/v1/completions"), ("///v1//completions/", "/v1/completions"),
     ("/v1/completions/", "/v1/completions"), ("/v1/completions ", "/v1/completions"),
     ("/v1/v1/chat/completions", "/v1/chat/completions"), ("/chat/completions", "/v1/chat/completions"),
     ("/V1/Completions", "/v1/completions"), ("/v1/chat/completion", "/v1/chat/completions"),
     ("/openai/v1/models/fake", "/v1/models/fake"), ("/v1/engines/fake/completions", "/v1/completions"),
     ("/v1/embedding", "/v1/embeddings"), ("/v1/completion", "/v1/completions"), ("/v1/chat", "/v1/chat/completions"),
     ("/api/v1/chat/completions", "/v1/chat/completions"), ("/v1/engines/fake/embeddings", "/v1/embeddings"),
     ("/openai/deployments/fake/chat/completions", "/v1/chat/completions"), ("/chat", "/v1/chat/completions"),
     ("/completion", "/v1/completions"), ("/embedding", "/v1/embeddings"), ("/v1/chat/completions/chat/completions", "/v1/chat/completions"),
     ("/v1/api/chat/completion", "/v1/chat/completions"), ("/v1/embed", "/v1/embeddings"), ("/v1/model", "/v1/models"),
     ("/models/Fake/", "/v1/models/Fake"), ("/server/generate", "/generate"), ("/infrence", "/inference"),
     ("/\u00e9", None), ("/xyzzy", None), ("/a" * 100, None), ("/" + "v1/completions" * 100, None)],
)  # fmt: skip
def test_a_wrong_path_is_named_as_it_was_sent_with_the_nearest_route(
    client: FlaskClient, path: str, nearest: str | None
) -> None:
    message = error(client.post("/", environ_overrides={"PATH_INFO": path.encode().decode("latin-1")}), 404)["message"]
    assert message.startswith(f"path '{path[:80]}")
    assert (f"Did you mean '{nearest}'?" in message) == (nearest is not None)
    assert nearest is not None or "Did you mean" not in message


def test_every_route_answers_another_method_with_405_and_its_own_methods(client: FlaskClient) -> None:
    routes: dict[str, set[str]] = {}
    for rule in client.application.url_map.iter_rules():
        routes.setdefault(re.sub(r"<[^>]*>", "x", rule.rule), set()).update(rule.methods or ())
    for path, methods in routes.items():
        for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} - methods:
            reply = client.open(path, method=method)
            assert (reply.status_code, set(reply.headers["Allow"].split(", "))) == (405, methods), (method, path)
            assert all(name in reply.text for name in methods)


def test_a_path_is_never_the_remedy_for_itself(client: FlaskClient) -> None:
    assert "Did you mean '/web/none.js'" not in client.get("/web/none.js").text


OPEN = {"/health", "/healthz", "/ping", "/ready", "/health/live", "/health/ready"}


@pytest.fixture(scope="module")
def locked() -> FlaskClient:
    return create_app(Config(api_key=KEY)).test_client()


def test_every_route_but_health_asks_for_the_key(locked: FlaskClient) -> None:
    rules = [(rule.rule, m) for rule in locked.application.url_map.iter_rules() for m in rule.methods or ()]
    assert {path for path, _ in rules} >= OPEN | {"/inference", "/stats", "/stats/token_data.csv", "/"}
    for path, method in rules:
        path = re.sub(r"<[^>]*>", "x", path)
        status = locked.open(path, method=method).status_code
        is_open = path in OPEN | {"/race", "/web/x", "/lab/", "/lab/x"}  # static files
        assert (status == 401) == (not is_open), (method, path)


@pytest.mark.parametrize(
    "header", [None, "", KEY, "Bearer", "Bearer ", "Bearer wrong", f"Bearer  {KEY}", f"bearer {KEY}",
               f"Basic {KEY}", f"Bearer {KEY} ", f"Bearer {KEY}x", "Bearer \xe9\xff"],
)  # fmt: skip
def test_a_wrong_key_is_refused(locked: FlaskClient, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    reply = locked.get(f"/stats?api_key={KEY}", headers=headers)
    assert error(reply, 401)["type"] == "authentication_error"
    assert reply.headers["WWW-Authenticate"] == "Bearer"
    assert KEY not in reply.text


def test_the_right_key_opens(locked: FlaskClient) -> None:
    assert locked.get("/stats", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
    assert locked.get("/nowhere").status_code == 404
