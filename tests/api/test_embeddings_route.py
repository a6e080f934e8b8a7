"""/v1/embeddings: forms of input and answer, what is refused."""

from __future__ import annotations

import base64
import json
import math
from array import array
from typing import Any

import pytest
from calls import Tiny, engine_of, error
from flask import Flask
from flask.testing import FlaskClient
from openai_calls import done

from app import create_app
from config import Config
from tests.support import wait_until
from tests.support.fakes import FakeModel, fake_engine, places_taken


def embed(client: FlaskClient, input: Any, **fields: Any) -> dict[str, Any]:
    reply = client.post("/v1/embeddings", json={"input": input} | fields)
    assert reply.status_code == 200, reply.text
    assert "X-Ignored-Params" not in reply.headers
    answer: dict[str, Any] = reply.get_json()
    return answer


def vectors(client: FlaskClient, input: Any, **fields: Any) -> list[list[float]]:
    data = embed(client, input, **fields)["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return [item["embedding"] for item in data]


def refused(client: FlaskClient, **fields: Any) -> dict[str, Any]:
    return error(client.post("/v1/embeddings", json={"input": "hi"} | fields))


def test_all_forms_of_input_are_read_and_counted(client: FlaskClient) -> None:
    assert embed(client, "hi", user="me", model="fake") == {
        "object": "list", "model": "fake", "usage": {"prompt_tokens": 2, "total_tokens": 2},
        "data": [{"object": "embedding", "index": 0, "embedding": [104 / 256, 0.0, 1.0, 2.0]}],
    }  # fmt: skip
    alone = vectors(client, "hi")
    assert vectors(client, [104, 105]) == vectors(client, ["hi"]) == vectors(client, [[104, 105]]) == alone
    both = alone + vectors(client, "abc")
    assert vectors(client, ["hi", "abc"]) == vectors(client, [[104, 105], [97, 98, 99]]) == both
    assert embed(client, ["hi", "abc"])["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert vectors(client, "abc", truncate_prompt_tokens=2) == vectors(client, "bc")
    assert len(vectors(client, "x" * 1024)) == 1


def test_base64_has_the_bits_of_the_numbers(client: FlaskClient) -> None:
    (text,) = vectors(client, "hi", encoding_format="base64")
    assert array("f", base64.b64decode(str(text))).tolist() == vectors(client, "hi")[0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"input": ""}, "input"), ({"input": []}, "input"), ({"input": ["a", ""]}, "input"), ({"input": [[]]}, "input"),
     ({"input": ["a"] * 65}, "input"), ({"input": [257]}, "input"), ({"input": [[1], [-1]]}, "input"),
     ({"input": "x" * 1025}, "input"), ({"input": [1, "a"]}, "input"), ({"input": None}, "input"),
     ({"input": {"text": "a"}}, "input"), ({"encoding_format": "int8"}, "encoding_format"), ({"pooling": "cls"}, "pooling"),
     ({"dimensions": 3}, "dimensions"), ({"dimensions": 0}, "dimensions"), ({"stream": True}, "stream"),
     ({"stream_options": {"include_usage": True}}, "stream_options"), ({"normalize": False}, "normalize"),
     ({"input_type": "query"}, "input_type"), ({"response_format": {"type": "json_object"}}, "response_format")],
)  # fmt: skip
def test_what_cannot_be_embedded_is_refused_by_name(client: FlaskClient, fields: dict[str, Any], param: str) -> None:
    assert refused(client, **fields)["param"].split(".")[0] == param


def test_refusals_name_the_bound(client: FlaskClient) -> None:
    assert "1,024" in refused(client, input="x" * 1025)["message"]
    assert refused(client, input="x" * 1025)["code"] == "context_length_exceeded"
    assert "dimensions is 256, but must be 4" in refused(client, dimensions=256)["message"]
    assert embed(client, "hi", dimensions=4, stream=False, normalize=True)["data"]
    assert error(client.post("/v1/embeddings", json={"input": "a", "model": "other"}), 404)["code"] == "model_not_found"


def test_more_inputs_than_the_queue_has_places_are_refused_whole(app: Flask, client: FlaskClient) -> None:
    assert error(client.post("/v1/embeddings", json={"input": ["a"] * 17}), 429)["type"] == "overloaded"
    assert len(vectors(client, ["a"] * 16)) == 16
    wait_until(lambda: places_taken(app) == 0)


def test_a_late_embedding_is_cancelled(model: FakeModel) -> None:
    app = create_app(Config(request_timeout=0.2), fake_engine(model))
    model.gate.clear()
    reply = app.test_client().post("/v1/embeddings", json={"input": "a"})
    model.gate.set()
    assert error(reply, 504)["type"] == "timeout_error"
    # A slow machine may be late again.
    wait_until(lambda: app.test_client().post("/v1/embeddings", json={"input": "hi"}).status_code == 200)
    engine_of(app).manager.stop()


def test_a_mock_models_embedding_is_a_unit_vector_that_the_prompt_decides(mock: FlaskClient) -> None:
    one, same, other = vectors(mock, ["ROMEO:", "ROMEO:", "JULIET:"])
    assert one == same != other
    assert math.hypot(*one) == pytest.approx(1, abs=1e-6)
    assert len(one) == engine_of(mock.application).width == 1024


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_model_embeds_64_inputs_as_each_alone(tiny: Tiny, pooling: str) -> None:
    client, engine = tiny
    width = engine.width
    asked = [f"{i} times a word that is {'long ' * (i % 9)}" for i in range(64)]
    found = vectors(client, asked, pooling=pooling, dimensions=width)
    assert len(found) == 64
    assert {len(numbers) for numbers in found} == {width}
    for i in (0, 7, 63):
        assert vectors(client, asked[i], pooling=pooling) == [found[i]]
    assert math.hypot(*found[5]) == pytest.approx(1, abs=1e-6)
    assert found[0] != vectors(client, asked[0], pooling="last" if pooling == "mean" else "mean")[0]
    packed = vectors(client, asked[7], pooling=pooling, encoding_format="base64")[0]
    assert array("f", base64.b64decode(str(packed))).tolist() == found[7]


def test_a_completion_beside_embeddings_has_its_own_text(tiny: Tiny) -> None:
    client, engine = tiny
    text = done(client, prompt="hi", max_tokens=20, temperature=0)["choices"]
    before = engine.manager.pages.used  # type: ignore[union-attr]
    vectors(client, ["hi"] * 8 + ["ho"] * 8)
    assert done(client, prompt="hi", max_tokens=20, temperature=0)["choices"] == text
    wait_until(lambda: engine.manager.pages.used == before)  # type: ignore[union-attr]


def test_every_large_answer_is_valid_json(tiny: Tiny) -> None:
    client, _ = tiny
    reply = client.post("/v1/embeddings", json={"input": ["word"] * 64})
    answer = json.loads(reply.data)
    assert len(answer["data"]) == 64
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
