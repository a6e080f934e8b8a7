"""Programs over HTTP: the fields and headers that name them, and where a server shows them."""

from __future__ import annotations

from typing import Any

import pytest
from calls import engine_of, service
from dialects import Dialect, every_dialect, post
from flask import Flask
from flask.testing import FlaskClient

from api.schemas.scheduling_hints import names_in
from scheduling.latest import KEPT


@pytest.mark.parametrize(
    ("headers", "program", "session", "parent"),
    [
        ({}, "", "", ""),
        ({"X-Session-ID": "s"}, "", "s", ""),
        ({"X-Session-ID": "s", "X-Program-ID": "p"}, "p", "s", ""),
        ({"X-Dynamo-Session-ID": "s", "X-Dynamo-Parent-Session-ID": "up"}, "", "s", "up"),
        ({"x-claude-code-session-id": "p"}, "p", "p", ""),
        ({"x-claude-code-session-id": "p", "x-claude-code-agent-id": "a", "x-claude-code-parent-agent-id": "b"},
         "p", "a", "b"),
        ({"session-id": "codex"}, "", "codex", ""),
        ({"x-session-id": "s", "x-parent-session-id": "up"}, "", "s", "up"),
        ({"X-Program-ID": "p" * 1000}, "p" * 256, "", ""),
    ],
)  # fmt: skip
def test_the_headers_of_other_servers_and_agents_name_programs(
    app: Flask, headers: dict[str, str], program: str, session: str, parent: str
) -> None:
    with app.test_request_context(headers=headers) as context:
        header = context.request.headers.get
        assert names_in(header) == {"program": program, "session": session, "parent": parent}
        assert names_in(header, "mine", "own") == {"program": "mine", "session": "own", "parent": parent}


@every_dialect
def test_the_fields_of_every_dialect_reach_the_policy(app: Flask, client: FlaskClient, dialect: Dialect) -> None:
    seen: list[Any] = []
    engine = engine_of(app)
    engine.manager.listeners.append(lambda inference: seen.append(inference.sequence))
    for fields in ({"program": "p", "session": "s"}, {"session_id": "t"}, {}):
        assert post(client, dialect, fields, limit=1).status_code == 200
    client.post("/v1/embeddings", json={"input": "hi", "program": "e"})
    found = [(seq.program, seq.session) for seq in seen]
    assert found == [("p", "s"), ("t", "t"), ("", ""), ("e", "")]


def test_a_record_shows_the_program_and_what_it_has_received(client: FlaskClient) -> None:
    for id, tokens, program in (("one", 3, "shown"), ("two", 2, "shown"), ("other", 1, None)):
        asked = {"prompt": "hi", "num_tokens": tokens, "program": program}
        client.post("/inference", json=asked, headers={"X-Request-Id": id})
    program = client.get("/requests/two").get_json()["program"]
    assert (program["name"], program["depth"], program["after"], program["calls"]) == ("shown", 2, ["one"], 2)
    assert program["output_tokens"] == 5
    assert client.get("/requests/other").get_json()["program"] is None
    assert client.get("/requests/one").get_json()["program"]["output_tokens"] == 3


def test_an_arrival_tells_its_program_and_no_metric_names_one(app: Flask, client: FlaskClient) -> None:
    for id in "ab":
        headers = {"X-Session-Id": "secret-plan", "X-Request-Id": id}
        client.post("/inference", json={"prompt": "hi", "num_tokens": 1}, headers=headers)
    told = b"".join(entry.frame for entry in service(app).feed.entries() if entry.kind == "arrival")
    assert b'"program":"secret-plan","after":[]' in told
    assert b'"program":"secret-plan","after":["a"]' in told
    assert "secret-plan" not in client.get("/metrics").text


def test_a_program_is_named_as_ignored_unless_the_order_goes_by_it(client: FlaskClient) -> None:
    body = {"prompt": "hi", "num_tokens": 1, "program": "p", "session_id": "s"}
    assert client.post("/inference", json=body).headers["X-Ignored-Params"] == "session_id, program"
    client.put("/policy", json={"policy": "dynamic+plas"})
    assert "X-Ignored-Params" not in client.post("/inference", json=body).headers


def test_more_programs_than_are_remembered_are_served_alike(app: Flask, client: FlaskClient) -> None:
    programs = service(app).programs
    for number in range(KEPT + 10):
        programs.begin(f"p{number}")
    assert client.post("/inference", json={"prompt": "hi", "num_tokens": 1, "program": "p0"}).status_code == 200
