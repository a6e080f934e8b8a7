"""X-Expected-Wait, and the refusal of what cannot be on time, in every dialect and also before a stream."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from calls import connected
from dialects import Dialect, every_dialect, post
from flask.testing import FlaskClient

from app import create_app
from config import Config
from launch.engine import load_engine
from scheduling.backlog import FITTED


@pytest.fixture(scope="module")
def client() -> Iterator[FlaskClient]:
    config = Config(policy="dynamic+admission-control", model="mock:llm-mock@50", access_log=False)
    for app in connected(create_app(config), load_engine(config)):
        client = app.test_client()
        first = client.post("/inference", json={"prompt": "hi", "num_tokens": FITTED, "slo_s": 1e-9})
        assert (first.status_code, "X-Expected-Wait" in first.headers) == (200, False)
        yield client


@every_dialect
@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_says_what_wait_was_expected_and_what_cannot_be_on_time_is_refused(
    client: FlaskClient, dialect: Dialect, streams: bool
) -> None:
    for more in ({}, {"slo_s": 100}):
        reply = post(client, dialect, more, limit=3, stream=streams)
        assert reply.status_code == 200
        assert 0 <= float(reply.headers["X-Expected-Wait"]) < 20
        assert reply.data
        reply.close()
    refused = post(client, dialect, {"slo_s": 1e-9}, limit=3, stream=streams)
    assert refused.status_code == 429
    assert int(refused.headers["Retry-After"]) >= 1
    assert float(refused.headers["X-Expected-Wait"]) >= 0
    assert "slo_s" in refused.get_data(as_text=True)


def test_a_policy_that_does_not_estimate_sends_no_header(client: FlaskClient) -> None:
    assert client.put("/policy", json={"policy": "dynamic"}).status_code == 200
    reply = client.post("/inference", json={"prompt": "hi", "num_tokens": 2, "slo_s": 1e-9})
    assert (reply.status_code, "X-Expected-Wait" in reply.headers) == (200, False)
    assert client.put("/policy", json={"policy": "dynamic+admission-control"}).status_code == 200
