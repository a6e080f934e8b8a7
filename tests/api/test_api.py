"""The HTTP face in-process: what is answered, what is refused and with which words, who needs the key."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from support import EOT, FakeModel, fake_engine, in_background, wait_until, write_checkpoint
from werkzeug.test import TestResponse

from api.dialects import native
from api.service import STALL_SECONDS, Engine, Service
from app import connect, create_app, load_engine, start
from config import Config

KEY = "s3cret"
BIG = 1 << 20


def service(app: Flask) -> Service:
    result: Service = app.extensions["service"]
    return result


@pytest.fixture
def app(model: FakeModel) -> Iterator[Flask]:
    app = create_app(Config(policy="dynamic"))
    engine = fake_engine(model)
    connect(service(app), engine)
    yield app
    engine.manager.stop()


def small(model: FakeModel, **options: Any) -> Flask:
    """Return an app whose queue or patience is as small as `options` say."""
    timeout = options.pop("request_timeout", 600.0)
    return create_app(Config(request_timeout=timeout), fake_engine(model, **options))


def ask(client: FlaskClient, **fields: Any) -> TestResponse:
    return client.post("/inference", json={"prompt": "hi", "num_tokens": 3} | fields)


def raw(client: FlaskClient, body: bytes, **options: Any) -> TestResponse:
    return client.post("/inference", data=body, **options)


def error(response: TestResponse, status: int = 400) -> dict[str, Any]:
    """Return the error of a refusal after checking what every refusal promises."""
    assert response.status_code == status, response.text
    assert response.mimetype == "application/json"
    assert len(response.data) < 8192
    assert not any(word in response.text for word in ("Traceback", ".py", "site-packages"))
    body = response.get_json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert len(body["error"]["message"]) > 20
    if status in (429, 503):
        assert int(response.headers["Retry-After"]) >= 1
    result: dict[str, Any] = body["error"]
    return result


# ---------------------------------------------------------------- answers


def test_the_original_request_gets_the_original_answer_and_more(client: FlaskClient) -> None:
    body = ask(client, prompt="hello ", num_tokens=4).get_json()
    assert body["completion"] == "hello abcd"
    assert body["num_tokens"] == 4
    assert (body["prompt_tokens"], body["cached_tokens"]) == (len("hello "), 0)
    assert (body["finish_reason"], body["stop_reason"]) == ("length", None)
    assert set(body["timings"]) == {
        "queue_s", "prefill_s", "decode_s", "ttft_s", "total_s", "iterations", "batch_mean", "batch_max",
    }  # fmt: skip
    assert body["timings"]["iterations"] == 4
    assert 0 <= body["timings"]["queue_s"] <= body["timings"]["ttft_s"] <= body["timings"]["total_s"]


@pytest.mark.parametrize("value", [10, "10", " 10 ", "+10", 10.0])
def test_num_tokens_may_be_what_int_made_of_it(client: FlaskClient, value: Any) -> None:
    assert ask(client, num_tokens=value).get_json()["num_tokens"] == 10


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "?"]
)
def test_any_content_type_will_do(client: FlaskClient, content_type: str | None) -> None:
    reply = raw(client, b'{"prompt": "x", "num_tokens": 1}', content_type=content_type)
    assert reply.get_json()["completion"] == "xa"


def test_a_byte_order_mark_is_read_over(client: FlaskClient) -> None:
    assert raw(client, b'\xef\xbb\xbf{"prompt": "x", "num_tokens": 1}').status_code == 200


@pytest.mark.parametrize("prompt", ["\0", "a\0b", " ", "\n", "😀", "e\u0301", EOT, f"a{EOT}b{EOT}"])
def test_any_text_is_a_prompt_and_comes_back_whole(client: FlaskClient, prompt: str) -> None:
    assert ask(client, prompt=prompt, num_tokens=2).get_json()["completion"] == prompt + "ab"


def test_unknown_fields_are_ignored_and_named(client: FlaskClient) -> None:
    reply = ask(client, **{"promt": "x", "max_new": 5, "line\nbreak": 1, "é\0": 2})
    assert reply.status_code == 200
    assert reply.headers["X-Ignored-Params"] == "promt, max_new, line?break, ??"
    assert "X-Ignored-Params" not in ask(client).headers


@pytest.mark.parametrize(
    ("path", "names"),
    [("/slots?fail_on_no_slot=0&fail_on_no_slots=1", "fail_on_no_slots"), ("/stats?a=1&b&a=2", "a, b"),
     ("/v1/models?limit=5", "limit"), ("/health?x=\u00e9%0a", "x"), ("/events?last=1&lost=2", "lost"),
     ("/requests/known?verbose=1", "verbose"), ("/metrics?name[]=x", "name[]"), ("/slots?fail_on_no_slot=0", None),
     ("/web/live.js?v=2", None), ("/race?a=1", None), ("/nowhere?a=1", None)],
)  # fmt: skip
def test_parameters_of_the_query_that_no_route_reads_are_named(
    client: FlaskClient, path: str, names: str | None
) -> None:
    known = {"X-Request-Id": "known"}
    client.post("/inference", json={"prompt": "x", "num_tokens": 1}, headers=known)
    with client.get(path) as reply:
        assert reply.headers.get("X-Ignored-Params") == names
    both = client.post("/inference?late=1", json={"prompt": "x", "num_tokens": 1, "odd": 2})
    assert both.headers["X-Ignored-Params"] == "odd, late"


def test_a_standing_that_the_policy_does_not_go_by_is_named_as_ignored(client: FlaskClient) -> None:
    assert ask(client, priority=3, slo_s=9).headers["X-Ignored-Params"] == "priority, slo_s"
    client.put("/policy", json={"policy": "dynamic+edf"})
    assert ask(client, priority=3, slo_s=9).headers["X-Ignored-Params"] == "priority"
    client.put("/policy", json={"policy": "dynamic+priority"})
    assert "X-Ignored-Params" not in ask(client, priority=3).headers


@pytest.mark.parametrize(
    "name", ["temperature", "top_k", "top_p", "seed", "stop", "ignore_eos", "timeout_s", "priority", "slo_s", "user"]
)
def test_null_is_as_good_as_absent(client: FlaskClient, name: str) -> None:
    assert ask(client, **{name: None}).get_json()["completion"] == "hiabc"


def test_the_parameters_reach_the_engine(app: Flask, client: FlaskClient) -> None:
    seen: list[Any] = []
    engine = service(app).engine
    assert engine is not None
    engine.manager.model.before = lambda plan: seen.extend(plan.sequences)  # type: ignore[attr-defined]
    fields = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "seed": -3, "ignore_eos": False}
    ask(client, **fields, user="ann", num_tokens=1)
    assert seen[0].sampling == fields
    assert seen[0].client == "ann"


@pytest.mark.parametrize("stop", ["c", ["x", "c"]])
def test_a_stop_ends_the_answer(client: FlaskClient, stop: Any) -> None:
    body = ask(client, stop=stop, num_tokens=9).get_json()
    assert (body["num_tokens"], body["finish_reason"]) == (3, "stop")


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 0}, {"temperature": -0.0}, {"temperature": 2}, {"top_k": -1}, {"top_k": 5.0},
     {"top_p": 1}, {"seed": -(2**63)}, {"seed": 2**63 - 1}, {"stop": []}, {"stop": ["a b"] * 4}],
)  # fmt: skip
def test_the_bounds_belong_to_what_is_allowed(client: FlaskClient, fields: dict[str, Any]) -> None:
    assert ask(client, **fields).status_code == 200


def test_a_request_with_a_timeout_ends_with_what_it_has(model: FakeModel, client: FlaskClient) -> None:
    third = threading.Event()
    model.before = lambda plan: (
        third.wait(10) if len(plan.sequences[0].output_ids) == 2 else None  # type: ignore[func-returns-value]
    )
    body = ask(client, num_tokens=900, timeout_s=0.2).get_json()
    third.set()
    assert (body["completion"], body["num_tokens"], body["finish_reason"]) == ("hiab", 2, "length")
    assert body["stop_reason"] == "timeout"
    assert body["timings"]["total_s"] >= 0.2
    assert ask(client, num_tokens=3, timeout_s=60).get_json()["completion"] == "hiabc"


def test_the_id_of_a_request_is_echoed_or_made(client: FlaskClient) -> None:
    given = {"X-Request-Id": "a-B.c:1_"}
    assert client.get("/stats", headers=given).headers["X-Request-Id"] == "a-B.c:1_"
    for bad in ("a b", "x" * 129, "<script>", ""):
        made = client.get("/nowhere", headers={"X-Request-Id": bad}).headers["X-Request-Id"]
        assert made != bad
        assert len(made) == 32


# ---------------------------------------------------------------- refusals of a body

BAD_BODIES = {
    "empty": (b"", "is empty", '{"prompt"'),
    "blank": (b" \n ", "is empty", '{"prompt"'),
    "no JSON": (b"{bad", "line 1, column 2", '{"prompt"'),
    "second line": (b'{"prompt": "x",\n  nope}', "line 2, column 3"),
    "trailing text": (b'{"prompt": "x", "num_tokens": 1} x', "Extra data", "column 34"),
    "list": (b"[]", "is []", "must be a JSON object"),
    "null": (b"null", "is None", "must be a JSON object"),
    "string": (b'"x"', "is 'x'", "must be a JSON object"),
    "number": (b"5", "is 5", "must be a JSON object"),
    "true": (b"true", "is True", "must be a JSON object"),
    "twice": (b'{"prompt": "x", "prompt": "y", "num_tokens": 1}', "'prompt'", "twice", "once"),
    "twice inside": (b'{"prompt": "x", "num_tokens": 1, "z": {"a": 1, "a": 2}}', "'a'", "twice"),
    "5,000 digits": (b'{"prompt": "x", "num_tokens": ' + b"9" * 5000 + b"}", "too long", "shorter"),
    "deep lists": (b"[" * 100_000 + b"]" * 100_000, "more than 32 levels", "flat"),
    "deep objects": (b'{"a":' * 5000, "more than 32 levels"),
    "UTF-16": ('{"prompt": "x", "num_tokens": 1}'.encode("utf-16"), "UTF-8 at byte 0", "UTF-8"),
    "Latin-1": ('{"prompt": "é", "num_tokens": 1}'.encode("latin-1"), "UTF-8 at byte 12"),
    "cut short": (b'{"prompt": "abc', "Unterminated string"),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_bad_body_is_refused(client: FlaskClient, model: FakeModel, name: str) -> None:
    body, *words = BAD_BODIES[name]
    refusal = error(raw(client, body))
    assert refusal["type"] == "invalid_request_error"
    for word in words:
        assert word in refusal["message"]
    assert model.plans == 0


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("name", ["num_tokens", "temperature", "top_p", "timeout_s", "seed", "unknown"])
def test_numbers_are_finite(client: FlaskClient, model: FakeModel, name: str, number: str) -> None:
    text = f'{{"prompt": "x", {"" if name == "num_tokens" else chr(34) + "num_tokens" + chr(34) + ": 1, "}"{name}": {number}}}'
    message = error(raw(client, text.encode()))["message"]
    assert number in message
    assert "finite" in message
    assert model.plans == 0


BAD_FIELDS: list[tuple[str, Any, str, str]] = [
    *(("num_tokens", value, "integer", "at least 1")
      for value in (True, False, 5.5, "x", "", "5.5", "1_0", [1], {"a": 1}, "1" * 40)),
    ("num_tokens", None, "is None", "at least 1"),
    *(("num_tokens", value, "greater than or equal to 1", "at least 1")
      for value in (0, -1, "0", "-7", 0.0, -(10**18))),
    *(("prompt", value, "valid string", "string")
      for value in (5, None, ["a"], {"a": 1}, True)),
    ("prompt", "", "at least 1 character", "string"),
    *(("temperature", value, "number", "from 0 (greedy) to 2") for value in ("1", True, [1])),
    *(("temperature", value, "equal to", "from 0 (greedy) to 2") for value in (-0.1, 2.1, 1e300)),
    ("temperature", 10**400, "2^63", "from 0 (greedy) to 2"),
    *(("top_p", value, "than", "above 0") for value in (0, -0.0, 1.01, -1)),
    *(("top_k", value, "than", "for all") for value in (-2, 2**31, 10**30)),
    *(("top_k", value, "integer", "for all") for value in (1.5, "5", True)),
    *(("seed", value, "than", "64-bit") for value in (2**63, -(2**63) - 1, 10**1000)),
    *(("seed", value, "integer", "64-bit") for value in (1.5, "7", True)),
    *(("stop", value, "", "at most 16") for value in ("", ["a"] * 17, "x" * 257, [1], {"a": 1}, [""], 5)),
    ("stop", "x" * 10_000, "256", "at most 16"),
    *(("ignore_eos", value, "boolean", "true or false") for value in ("true", 1, 0)),
    *(("timeout_s", value, "than 0", "above 0") for value in (0, -1)),
    ("timeout_s", "5", "number", "above 0"),
    ("priority", 1.5, "integer", "64-bit"),
    ("priority", 10**30, "than", "64-bit"),
    ("slo_s", 0, "greater than 0", "above 0"),
    ("user", 5, "string", "256"),
    ("user", "x" * 257, "256", "256"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "bound", "remedy"), BAD_FIELDS, ids=lambda v: repr(v)[:24])
def test_a_bad_field_is_refused_with_value_bound_and_remedy(
    client: FlaskClient, model: FakeModel, name: str, value: Any, bound: str, remedy: str
) -> None:
    refusal = error(ask(client, **{name: value}))
    assert refusal["type"] == "invalid_request_error"
    assert refusal["param"] == name
    message = refusal["message"]
    assert message.startswith(name)
    assert bound in message
    assert f"Send {'a' if name != 'ignore_eos' else 'true'}" in message
    assert remedy in message
    inner = value[0] if isinstance(value, list) and len(value) == 1 else value
    assert repr(inner)[:20] in message or str(inner)[:20] in message
    assert len(message) < 400
    assert model.plans == 0


def test_lone_surrogates_are_refused(client: FlaskClient, model: FakeModel) -> None:
    for body in (rb'{"prompt": "\ud800", "num_tokens": 1}', rb'{"prompt": "x", "num_tokens": 1, "stop": "\udfff"}'):
        error(raw(client, body))
    assert raw(client, rb'{"prompt": "\ud83d\ude00", "num_tokens": 1}').status_code == 200
    reply = raw(client, rb'{"prompt": "x", "num_tokens": 1, "\ud800": 1}')
    assert reply.headers["X-Ignored-Params"] == "?"
    assert model.plans == 2


def test_a_missing_prompt_beside_a_mistyped_one_suggests_it(client: FlaskClient) -> None:
    refusal = error(client.post("/inference", json={"promt": "x", "num_tokens": 1}))
    assert refusal["param"] == "prompt"
    assert "prompt is missing" in refusal["message"]
    assert "'promt'" in refusal["message"]
    assert "?" not in error(client.post("/inference", json={"num_tokens": 1}))["message"]


def test_everything_that_is_wrong_is_said_at_once(client: FlaskClient) -> None:
    message = error(ask(client, prompt="", num_tokens=0, top_p=2, top_k=-5, seed="x", stop="", user=1))["message"]
    assert message.count("Send ") == 5
    assert message.endswith("and 2 more")


def test_a_body_is_counted_while_it_is_read(client: FlaskClient, model: FakeModel) -> None:
    head = b'{"num_tokens": 1, "prompt": "'
    just_too_large = head + b"x" * (BIG + 1 - len(head) - 2) + b'"}'
    assert len(just_too_large) == BIG + 1
    for reply in (
        raw(client, just_too_large),
        client.post("/inference", input_stream=io.BytesIO(just_too_large),
                    environ_overrides={"wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}),
        client.post("/inference", environ_overrides={"CONTENT_LENGTH": str(10 * BIG)}),
    ):  # fmt: skip
        assert "1,048,576 bytes" in error(reply, 413)["message"]
    assert "context" in error(raw(client, just_too_large[:-3] + b'"}'))["message"]
    assert model.plans == 0


def test_a_body_in_small_pieces_is_put_together(client: FlaskClient) -> None:
    class Trickle(io.BytesIO):
        rest = b'{"prompt": "x", "num_tokens": 1}'

        def read(self, size: int | None = -1) -> bytes:
            piece, self.rest = self.rest[:3], self.rest[3:]
            return piece

    reply = client.post("/inference", input_stream=Trickle(), environ_overrides={"wsgi.input_terminated": True})
    assert reply.get_json()["completion"] == "xa"


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip"])
def test_compressed_bodies_are_not_unpacked(client: FlaskClient, encoding: str) -> None:
    reply = raw(client, b"\x1f\x8b" + b"0" * 100, headers={"Content-Encoding": encoding})
    assert "Content-Encoding" in error(reply, 415)["message"]
    plain = raw(client, b'{"prompt": "x", "num_tokens": 1}', headers={"Content-Encoding": "identity"})
    assert plain.status_code == 200


# ---------------------------------------------------------------- refusals for the context


def test_a_prompt_and_its_answer_must_fit_the_context(client: FlaskClient, model: FakeModel) -> None:
    refusal = error(ask(client, prompt="x" * 1000, num_tokens=25))
    assert refusal["message"] == (
        "prompt has 1,000 tokens and num_tokens is 25; their sum must be at most 1,024. "
        "Shorten the prompt or request at most 24 tokens"
    )
    assert (refusal["param"], refusal["code"]) == ("num_tokens", "context_length_exceeded")
    assert model.plans == 0
    assert ask(client, prompt="x" * 1000, num_tokens=24).get_json()["num_tokens"] == 24


@pytest.mark.parametrize("length", [1024, 1025, 3000])
def test_a_prompt_that_fills_the_context_leaves_no_room(client: FlaskClient, length: int) -> None:
    refusal = error(ask(client, prompt="x" * length, num_tokens=1))
    assert f"{length:,} tokens" in refusal["message"]
    assert "1,024. Shorten the prompt to at most 1,023 tokens" in refusal["message"]
    assert (refusal["param"], refusal["code"]) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize("number", [1024, 10**9, 2**63, 10**4000])
def test_huge_numbers_of_tokens_are_refused(client: FlaskClient, number: int) -> None:
    refusal = error(ask(client, num_tokens=number))
    assert "at most 1,022 tokens" in refusal["message"]
    assert len(refusal["message"]) < 400


def test_what_cannot_fit_is_not_even_tokenized(app: Flask, client: FlaskClient) -> None:
    engine = service(app).engine
    assert engine is not None
    limit = engine.context * engine.tokenizer.longest_token
    refusal = error(ask(client, prompt="é" * (limit // 2 + 1)))
    assert f"{limit + 2:,} bytes" in refusal["message"]
    assert f"{limit:,}. Shorten the prompt" in refusal["message"]
    assert engine.tokenizer.encoded == 0  # type: ignore[attr-defined]


# ---------------------------------------------------------------- a server in trouble


def test_a_full_queue_refuses_with_a_time_to_come_back(model: FakeModel) -> None:
    go = threading.Event()
    model.before = lambda plan: go.wait(10) and None  # type: ignore[func-returns-value]
    app = small(model, max_batch_size=1, max_queue=1)
    client = app.test_client()
    engine = service(app).engine
    assert engine is not None
    with in_background(lambda: ask(client)) as first, in_background(lambda: ask(client)) as second:
        wait_until(lambda: engine.manager.running + engine.manager.waiting == 2)
        refusal = error(ask(client), 429)
        go.set()
    assert refusal["type"] == "overloaded"
    assert "2 requests queued or running" in refusal["message"]
    assert "--max-queue" in refusal["message"]
    assert [r.status_code for r in first + second] == [200, 200]
    assert ask(client).status_code == 200
    engine.manager.stop()


def test_a_failing_step_answers_500_and_the_loop_goes_on(model: FakeModel, app: Flask, client: FlaskClient) -> None:
    def fail(plan: Any) -> None:
        if plan.number:  # the engine itself is sound: a token of nobody's comes
            raise RuntimeError("tensor at /srv/x.py is broken")

    model.before = fail
    refusal = error(ask(client), 500)
    assert refusal["type"] == "server_error"
    assert "RuntimeError" in refusal["message"]
    model.before = lambda plan: None
    assert ask(client).get_json()["completion"] == "hiabc"
    assert client.get("/health").status_code == 200
    stats = client.get("/stats").get_json()
    assert (stats["requests"], stats["requests-failed"]) == (1, 1)


def test_an_answer_that_does_not_come_in_time_is_504_and_frees_its_place(model: FakeModel) -> None:
    model.before = lambda plan: time.sleep(0.02)
    app = small(model, request_timeout=0.1, max_batch_size=1, max_queue=0)
    client = app.test_client()
    refusal = error(ask(client, num_tokens=500), 504)
    assert refusal["type"] == "timeout_error"
    assert "0.1 s" in refusal["message"]
    assert "--request-timeout" in refusal["message"]
    model.before = lambda plan: None
    engine = service(app).engine
    assert engine is not None
    wait_until(lambda: engine.manager.running == 0 and ask(client).status_code == 200)
    assert error(ask(client, prompt="x" * 1020, num_tokens=999)) is not None
    engine.manager.stop()


def test_the_servers_own_limit_comes_before_a_longer_one_of_the_request(model: FakeModel) -> None:
    model.before = lambda plan: time.sleep(0.02)
    app = small(model, request_timeout=0.1)
    error(ask(app.test_client(), num_tokens=500, timeout_s=1e300), 504)
    engine = service(app).engine
    assert engine is not None
    engine.manager.stop()


def test_a_server_that_loads_says_so_and_still_has_stats() -> None:
    client = create_app(Config(policy="static")).test_client()
    refusal = error(ask(client), 503)
    assert refusal["type"] == "unavailable_error"
    assert "loading" in refusal["message"]
    health = client.get("/health")
    assert health.status_code == 503
    assert health.headers["Retry-After"] == "1"
    assert health.get_json() == {
        "status": "loading", "policy": "static", "reason": "the model is loading",
        "last_iteration_age_s": None,
    }  # fmt: skip
    assert client.get("/health/live").get_json() == {"status": "ok"}
    stats = client.get("/stats").get_json()
    assert (stats["engine"], stats["policy"], stats["requests-waiting"]) == (None, "static", 0)
    assert client.get("/stats/token_data.csv").data == b""


def test_a_model_that_cannot_be_loaded_is_said_and_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = create_app(Config(model=str(tmp_path)))
    failed: list[bool] = []
    thread = start(app, on_failure=lambda: failed.append(True))
    assert start(app) is thread
    thread.join()
    assert failed == [True]
    health = app.test_client().get("/health")
    assert (health.status_code, health.get_json()["status"]) == (503, "dead")
    assert "has no config.json" in health.get_json()["reason"]
    error(ask(app.test_client()), 503)
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_died_is_told(model: FakeModel, app: Flask, client: FlaskClient) -> None:
    def die(plan: Any) -> None:
        raise SystemExit

    model.before = die
    assert error(ask(client), 503)["type"] == "unavailable_error"
    assert error(ask(client), 503)["type"] == "unavailable_error"
    assert client.get("/health").get_json()["status"] == "dead"


def test_a_loop_that_hangs_is_told(app: Flask, client: FlaskClient, model: FakeModel) -> None:
    go = threading.Event()
    model.before = lambda plan: go.wait(10) and None  # type: ignore[func-returns-value]
    engine = service(app).engine
    assert engine is not None
    with in_background(lambda: ask(client)):
        wait_until(lambda: model.plans)
        engine.manager.inbox.heartbeat -= STALL_SECONDS + 1
        assert client.get("/health").get_json()["status"] == "stalled"
        assert "for 30" in error(ask(client), 503)["message"]
        go.set()
    assert client.get("/health").status_code == 200


def test_a_handler_that_fails_answers_without_its_secrets(
    app: Flask, client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise KeyError("/srv/secret.py")

    monkeypatch.setattr(native, "answer", fail)
    refusal = error(ask(client), 500)
    assert refusal["type"] == "server_error"


# ---------------------------------------------------------------- looking in

ORIGINAL = ["latency-per-token", "throughput", "total-tokens-handled", "total-elapsed-time"]
ADDED = ["requests", "requests-failed", "requests-cancelled", "requests-running", "requests-waiting",
         "throughput-wall", "latency-p50", "latency-p90", "latency-p99", "ttft-p50", "ttft-p99",
         "tpot-p50", "tpot-p99", "itl-p50", "itl-p99", "policy", "engine"]  # fmt: skip
ENGINE = ["model", "device", "dtype", "iterations", "uptime_s", "batch_stats", "slot_steps", "kv"]


def test_stats_before_the_first_request_are_null_or_zero(client: FlaskClient) -> None:
    for _ in range(2):
        reply = client.get("/stats")
        stats = reply.get_json()
        assert reply.status_code == 200
        assert list(stats)[:4] == ORIGINAL
        assert [stats[key] for key in ORIGINAL] == [None, None, 0, 0]
        assert set(ORIGINAL + ADDED) <= set(stats)
        assert set(ENGINE) <= set(stats["engine"])


def test_stats_keep_the_formulas_of_the_original(client: FlaskClient) -> None:
    times = {n: ask(client, num_tokens=n).get_json()["timings"]["total_s"] for n in (2, 5, 9)}
    stats = client.get("/stats").get_json()
    assert stats["total-tokens-handled"] == 16
    assert stats["total-elapsed-time"] == pytest.approx(sum(times.values()))
    assert stats["throughput"] == pytest.approx(16 / sum(times.values()))
    assert stats["latency-per-token"] == pytest.approx(sum(t / n for n, t in times.items()) / 3)
    assert stats["requests"] == 3
    assert stats["throughput-wall"] > 0
    assert stats["engine"]["batch_stats"][0] | {"seconds": 0} == {"batch_size": 1, "count": 16, "seconds": 0}
    assert set(stats["engine"]["slot_steps"]) == {"useful", "padding", "held", "idle", "recomputed"}


def test_the_table_by_length_is_a_csv(client: FlaskClient) -> None:
    for n in (7, 2, 7):
        ask(client, num_tokens=n)
    reply = client.get("/stats/token_data.csv")
    assert reply.mimetype == "text/csv"
    rows = [line.split(",") for line in reply.text.splitlines()]
    assert [row[0] for row in rows] == ["2", "7"]
    assert all(float(row[1]) > 0 for row in rows)


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
    assert body["last_iteration_age_s"] < 5


def test_a_post_to_the_root_is_greeted(client: FlaskClient) -> None:
    reply = client.post("/", data=b"whatever")
    assert (reply.status_code, reply.mimetype) == (200, "text/plain")
    assert len(reply.text.splitlines()) == 1


@pytest.mark.parametrize(
    "path", ["/nowhere", "//", "//inference", "/inference/", "/%2e%2e/etc/passwd", "/static/app", "/stats%00"]
)
def test_an_unknown_path_is_404_and_lists_the_known(client: FlaskClient, path: str) -> None:
    refusal = error(
        client.get("/", environ_overrides={"PATH_INFO": path}) if path.startswith("//") else client.get(path), 404
    )
    assert refusal["type"] == "not_found_error"
    assert "/inference" in refusal["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"), [("GET", "/inference", "POST"), ("PUT", "/stats", "GET"), ("DELETE", "/", "POST")]
)
def test_a_wrong_method_is_405_with_allow(client: FlaskClient, method: str, path: str, allowed: str) -> None:
    reply = client.open(path, method=method)
    refusal = error(reply, 405)
    assert allowed in reply.headers["Allow"].split(", ")
    assert allowed in refusal["message"]


def test_pages_of_other_sites_are_refused(client: FlaskClient, model: FakeModel) -> None:
    body = b'{"prompt": "x", "num_tokens": 1}'
    for content_type in ("text/plain", "application/json"):
        reply = raw(client, body, headers={"Sec-Fetch-Site": "cross-site"}, content_type=content_type)
        assert error(reply, 403)["type"] == "permission_error"
        assert "Access-Control-Allow-Origin" not in reply.headers
    assert model.plans == 0
    assert raw(client, body, headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200


# ---------------------------------------------------------------- the key

OPEN = {"/health", "/healthz", "/ping", "/ready", "/health/live", "/health/ready"}


@pytest.fixture
def locked() -> FlaskClient:
    return create_app(Config(api_key=KEY)).test_client()


def test_every_route_but_health_asks_for_the_key(locked: FlaskClient) -> None:
    rules = [(rule.rule, m) for rule in locked.application.url_map.iter_rules() for m in rule.methods or ()]
    assert {path for path, _ in rules} >= OPEN | {"/inference", "/stats", "/stats/token_data.csv", "/"}
    for path, method in rules:
        path = re.sub(r"<[^>]*>", "x", path)
        status = locked.open(path, method=method).status_code
        is_open = path in OPEN | {"/race", "/web/x"}  # static files
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


# ---------------------------------------------------------------- a real model, tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FlaskClient, Engine]]:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    config = Config(policy="dynamic", model=str(folder), compute_threads=1, kv_memory=64 << 20)
    app = create_app(config)
    engine = load_engine(config)
    wait_until(lambda: engine.manager.is_alive)
    connect(service(app), engine)
    yield app.test_client(), engine
    engine.manager.stop()


Tiny = tuple[FlaskClient, Engine]


def test_a_seed_repeats_and_temperature_0_is_greedy(tiny: Tiny) -> None:
    client, _ = tiny
    texts = [ask(client, num_tokens=20, seed=seed).get_json()["completion"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    greedy = [ask(client, num_tokens=20, temperature=0, seed=s).get_json()["completion"] for s in (1, 2)]
    assert greedy[0] == greedy[1]
    assert ask(client, num_tokens=20, top_k=1, seed=3).get_json()["completion"] == greedy[0]
    assert ask(client, num_tokens=20, top_p=1e-9, seed=4).get_json()["completion"] == greedy[0]
    drawn = {ask(client, num_tokens=20).get_json()["completion"] for _ in range(3)}
    assert len(drawn) == 3


def test_a_stop_string_is_cut_off_across_tokens(tiny: Tiny) -> None:
    client, _ = tiny
    fields = {"num_tokens": 60, "seed": 5}
    whole = ask(client, **fields).get_json()["completion"][2:]
    stop = next(whole[i : i + 2] for i in range(10, 50) if "\ufffd" not in whole[i : i + 2])
    body = ask(client, **fields, stop=[stop, "never"]).get_json()
    assert body["completion"] == "hi" + whole[: whole.index(stop)]
    assert body["finish_reason"] == "stop"
    assert body["num_tokens"] < 60


def test_end_of_text_in_a_prompt_is_plain_text(tiny: Tiny) -> None:
    client, engine = tiny
    ids = engine.tokenizer.encode(f"a{EOT}")
    assert len(ids) > 5
    assert ask(client, prompt=f"{EOT}a{EOT}", num_tokens=2).get_json()["completion"].startswith(f"{EOT}a{EOT}")
    reply = ask(client, prompt="\0" * 9, num_tokens=1)
    assert reply.get_json()["completion"].startswith("\0" * 9)


def test_the_context_of_a_real_model_ends_where_it_says(tiny: Tiny) -> None:
    client, engine = tiny
    prompt = "the " * 400
    length = len(engine.tokenizer.encode(prompt))
    message = error(ask(client, prompt=prompt, num_tokens=1000))["message"]
    room = engine.context - length
    assert f"{length:,} tokens and num_tokens is 1,000" in message
    assert f"at most {room:,} tokens" in message
    body = ask(client, prompt=prompt, num_tokens=room, temperature=0).get_json()
    assert body["num_tokens"] == room
    error(ask(client, prompt=prompt, num_tokens=room + 1))


def test_a_timeout_of_a_real_request_frees_its_pages(tiny: Tiny) -> None:
    client, engine = tiny
    body = ask(client, num_tokens=1000, timeout_s=0.01).get_json()
    assert body["finish_reason"] == "length"
    assert 0 <= body["num_tokens"] < 1000
    pages = engine.manager.pages
    assert pages is not None
    wait_until(lambda: pages.used == 0)


def test_stats_tell_about_a_real_engine(tiny: Tiny) -> None:
    client, _ = tiny
    ask(client)
    stats = client.get("/stats").get_json()
    json.dumps(stats, allow_nan=False)
    assert stats["policy"] == "dynamic"
    assert stats["engine"]["device"] == "cpu"
    assert {"pages_total", "pages_used", "query_tokens", "hit_tokens"} <= set(stats["engine"]["kv"])
