"""A process that can get no more memory refuses requests before it reads them."""

from __future__ import annotations

import pytest
from calls import error
from flask.testing import FlaskClient

from serving import headroom
from tests.support.fakes import FakeModel

BODIES = {
    "/inference": {"prompt": "hi", "num_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/tokenize": {"prompt": "hi"},
}


def test_without_memory_every_dialect_answers_503_and_computes_nothing(
    client: FlaskClient, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(headroom, "HEADROOM", 1 << 60)
        for path, body in BODIES.items():
            assert error(client.post(path, json=body), 503)["code"] == "out_of_memory"
        answer = client.post("/generate", json={"inputs": "hi"})
        assert (answer.status_code, answer.json["error_type"]) == (503, "out_of_memory")
        assert model.plans == 0
    assert client.post("/inference", json=BODIES["/inference"]).status_code == 200
