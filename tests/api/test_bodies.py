"""What the worst body of each field of each route may cost: time, memory, and the time of others."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from hypothesis import given
from hypothesis import strategies as st

import app as application
from api.http.errors import ApiError, shown
from api.schemas import body
from config import Config
from tests.support import wait_until
from tests.support.bodies import KINDS, fields_of, hostile, put
from tests.support.fakes import FakeModel, fake_engine, places_taken

ROUTES = ("/inference", "/v1/completions", "/v1/chat/completions", "/generate", "/generate_stream",
          "/tokenize", "/detokenize", "/policy", "/load")  # fmt: skip
MB = 1 << 20
FULL = b"[" + b",".join([b"1"] * (MB // 2)) + b"]"


@pytest.fixture(scope="module")
def app() -> Iterator[Flask]:
    engine = fake_engine(FakeModel())
    yield application.create_app(Config(policy="dynamic", max_batch_size=8, max_queue=8), engine)
    engine.manager.stop()


def seconds_of(act: Callable[[], Any]) -> float:
    """Return the time that the processor works on `act` in this thread."""
    began = time.thread_time()
    act()
    return time.thread_time() - began


@pytest.fixture(scope="module")
def yardstick() -> float:
    """The time that this machine needs to read a body of ones without checking it."""
    return min(seconds_of(lambda: json.loads(FULL)) for _ in range(2))


def is_within(seconds: float, act: Callable[[], Any]) -> bool:
    """Whether `act` takes so little at least once: garbage is collected, other programs slow it down."""
    return any(seconds_of(act) < seconds for _ in range(6))


def memory_of(act: Callable[[], Any]) -> int:
    """Return the most bytes that `act` has in use at a time."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def read(sent: bytes) -> Any:
    """Return what a body holds, None of one that is refused."""
    with contextlib.suppress(ApiError):
        return body.parse(sent, "{}")


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_body_costs_much_to_read(kind: str, yardstick: float) -> None:
    sent = f'{{"x": {KINDS[kind](MB - 9)}}}'.encode()
    assert is_within(6 * yardstick, lambda: read(sent))
    assert memory_of(lambda: read(sent)) < 24 * MB


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_value_costs_much_to_check_in_any_field(app: Flask, kind: str, yardstick: float) -> None:
    read_once = read(f'{{"x": {KINDS[kind](MB - 9)}}}'.encode())
    if read_once is None:
        return  # such a body is refused before any field is checked
    for operation, place in fields_of(app.extensions["service"].operations):

        def check(operation: Any = operation, place: Any = place, value: Any = read_once["x"]) -> None:
            fields = put(copy.deepcopy(operation.example), place, value)
            with contextlib.suppress(ApiError):
                body.validate(operation.body, fields)

        assert is_within(2 * yardstick, check), (operation.path, place)
        assert memory_of(check) < 12 * MB, (operation.path, place)


@pytest.mark.full
@pytest.mark.parametrize("route", ROUTES)
def test_no_value_in_any_field_makes_a_request_slow(app: Flask, route: str, yardstick: float) -> None:
    client = app.test_client()
    for sent in hostile(app.extensions["service"].operations, route):

        def send(sent: Any = sent) -> None:
            client.open(sent.path, method=sent.method, data=sent.body, content_type="application/json").close()

        assert is_within(6 * yardstick, send), sent.name
    client.delete("/load")  # what is left of a load would fill the queue of the tests that follow
    wait_until(lambda: not client.get("/load").get_json()["active"])


@pytest.mark.parametrize("keys", [16_000, 5_000])
def test_a_key_that_is_there_twice_is_found_in_one_pass(keys: int, yardstick: float) -> None:
    sent = json.dumps({"inner": dict.fromkeys(map(str, range(keys)))}).encode()[:-2]
    sent += f',"{keys - 1}":1}}}}'.encode()

    def refuse() -> None:
        with pytest.raises(ApiError, match=f"'{keys - 1}' appears twice"):
            body.parse(sent, "{}")

    assert is_within(2 * yardstick, refuse)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (KINDS["ones that fill the body"](MB - 9), r"values \(limit 131,072"),
        (KINDS["lists that fill the body"](MB - 9), r"keys, lists and objects \(limit 16,384"),
        (KINDS["keys that fill the body"](MB - 9), r"keys, lists and objects \(limit 16,384"),
        (KINDS["brackets"](MB - 9), "more than 32 levels"),
    ],
    ids=["values", "lists", "keys", "brackets"],
)
def test_a_body_of_too_many_values_is_refused_before_they_are_built(text: str, says: str) -> None:
    sent = f'{{"x": {text}}}'.encode()

    def refuse() -> None:
        with pytest.raises(ApiError, match=says):
            body.parse(sent, "{}")

    assert memory_of(refuse) < 24 * MB


texts = st.text(alphabet='\\"[]{},:a\n', max_size=12)


@given(st.lists(texts, max_size=6), st.dictionaries(texts, texts, max_size=3))
def test_what_is_in_texts_counts_as_nothing(listed: list[str], keyed: dict[str, str]) -> None:
    values = {"x": listed, "y": keyed}
    sent = json.dumps(values).encode()
    keys = 4 + len(keyed)  # x, y, the two objects, and the list
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "DEPTH", 2)
        patch.setattr(body, "MOST_VALUES", 12)
        patch.setattr(body, "MOST_KEYS", keys + 1)
        assert body.parse(sent, "{}") == values
        patch.setattr(body, "MOST_KEYS", keys)
        with pytest.raises(ApiError, match="keys, lists and objects"):
            body.parse(sent, "{}")
        patch.setattr(body, "DEPTH", 1)
        with pytest.raises(ApiError, match="more than 1 levels"):
            body.parse(sent, "{}")


def test_a_list_says_its_length_before_anything_of_its_items(client: FlaskClient) -> None:
    for path, fields, field in (
        ("/inference", {"prompt": "x", "num_tokens": 1}, "stop"),
        ("/v1/completions", {"prompt": "x"}, "stop_token_ids"),
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/responses", {}, "input"),
        ("/detokenize", {}, "tokens"),
    ):
        reply = client.post(path, json=fields | {field: ["xxxxx"] * 70_000})
        message = reply.get_json()["error"]["message"]
        assert reply.status_code == 400
        assert "70,000" in message, message
        assert message.count("Send ") == 1


def test_only_the_first_wrong_item_of_a_list_is_told(client: FlaskClient) -> None:
    message = client.post("/detokenize", json={"tokens": [1, -1, "x", -2]}).get_json()["error"]
    assert message["message"].startswith("tokens.1 is -1")
    assert message["message"].count("Send ") == 1


def test_of_many_unknown_fields_the_first_are_named_and_the_guess_is_quick(
    client: FlaskClient, yardstick: float
) -> None:
    fields = dict.fromkeys((f"promt{i}" for i in range(16_000)), 1)
    sent = json.dumps(fields | {"num_tokens": 1})
    replies: list[Any] = []
    assert is_within(8 * yardstick, lambda: replies.append(client.post("/inference", data=sent)))
    assert "'promt" in replies[0].get_json()["error"]["message"]
    reply = client.post("/inference", json=fields | {"prompt": "x", "num_tokens": 1})
    assert reply.status_code == 200
    assert reply.headers["X-Ignored-Params"].startswith("promt0, promt1, ")


@given(
    st.recursive(
        st.integers() | st.text(max_size=110),
        lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=9), inner, max_size=5),
        max_leaves=20,
    )
)
def test_a_value_is_shown_as_json_up_to_a_length(value: Any) -> None:
    text = shown(value)
    assert len(text) <= 100
    if not text.endswith("…") and not isinstance(value, str):
        assert json.loads(text) == value


def test_a_number_of_any_size_is_a_bad_option_of_a_policy_and_no_failure(client: FlaskClient) -> None:
    reply = client.put("/policy", json={"policy": "dynamic", "options": {"w_q": 10**400}})
    assert reply.status_code == 400
    assert "w_q" in reply.get_json()["error"]["message"]


# ---------------------------------------------------------------- tokens


def test_a_text_that_cannot_fit_is_not_tokenized_for_anybody(client: FlaskClient) -> None:
    for name in ("prompt", "inputs"):
        reply = client.post("/tokenize", json={name: "x" * 5000})
        error = reply.get_json()["error"]
        assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
        assert f"{name} has 5,000 bytes, but a context of 1,024 tokens holds at most 4,096" in error["message"]


def test_a_large_answer_comes_in_parts_that_join_to_the_same(client: FlaskClient) -> None:
    for text in ("", "a", "ab" * 2000, "é" * 2000, '"\\\n' * 1000):
        ids = list(text.encode())
        reply = client.post("/tokenize", json={"prompt": text})
        assert reply.get_json() == {"count": len(ids), "max_model_len": 1024, "tokens": ids}
        answer = client.post("/tokenize", json={"inputs": text}).get_json()
        assert [piece["id"] for piece in answer] == ids
        assert all(piece["text"] == text[piece["start"] : piece["stop"]] for piece in answer)
        places = [i for i, c in enumerate(text) for _ in c.encode()]
        assert [piece["start"] for piece in answer] == places
        back = client.post("/detokenize", json={"tokens": ids * 8})
        assert back.get_json() == {"prompt": text * 8}


def test_a_large_body_to_tokenize_needs_a_place_and_a_small_one_none(model: FakeModel) -> None:
    model.gate.clear()
    engine = fake_engine(model, max_batch_size=1, max_queue=0)
    app = application.create_app(Config(max_batch_size=1, max_queue=0), engine)
    service, client = app.extensions["service"], app.test_client()
    ask = {"prompt": "x", "num_tokens": 1}
    waiting = threading.Thread(target=lambda: app.test_client().post("/inference", json=ask))
    waiting.start()
    try:
        wait_until(lambda: engine.manager.running == 1)
        for path, fields in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1] * 9})):
            assert client.post(path, json=fields).status_code == 200
            refused = client.post(path, json=fields | {"unknown": "x" * 20_000})
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    finally:
        model.gate.set()
        waiting.join(60)
    large = client.post("/tokenize", json={"inputs": "x" * 4000, "unknown": "x" * 20_000})
    assert len(large.get_json()) == 4000
    large.close()
    assert places_taken(app) == 0
    received = service.meters.http_totals()["received"]
    assert received == 1  # the others were no requests to generate
    engine.manager.stop()


def test_scores_of_many_prompts_come_in_parts_that_join_to_the_same(client: FlaskClient) -> None:
    prompts = [chr(97 + i) * 400 for i in range(8)]
    asked = {"echo": True, "logprobs": 2, "max_tokens": 2, "n": 1}
    reply = client.post("/v1/completions", json=asked | {"prompt": prompts, "promt": 1})
    assert reply.headers["X-Ignored-Params"] == "promt"
    together = reply.get_json()
    assert together["usage"]["total_tokens"] == 8 * 402
    for i, prompt in enumerate(prompts):
        small = client.post("/v1/completions", json=asked | {"prompt": prompt})
        alone = small.get_json()
        assert together["choices"][i] == alone["choices"][0] | {"index": i}
        assert alone.keys() == together.keys()
