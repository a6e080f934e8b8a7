"""POST /what-if: what is asked, what is refused, and the same by a real server."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from calls import error, service
from flask import Flask

from app import connect, create_app
from config import Config
from serving.inference import InferenceError
from tests.support import wait_until
from tests.support.fakes import FakeModel, fake_engine
from tests.support.servers import Server


class Answers:
    """Stands for the simulations, and keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.fails: InferenceError | None = None

    def answer(self, policies: list[str], count: int, *, options: Any, span: Any, workload: Any) -> bytes:
        self.asked.append((policies, options, count, span, workload))
        if self.fails:
            raise self.fails
        return b'{"lanes":[]}\n'

    def blame(self, id: str) -> bytes:
        self.asked.append(id)
        if self.fails:
            raise self.fails
        return b'{"others":[]}\n'

    def stop(self) -> None:
        self.asked.append("stop")


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def app(model: FakeModel, answers: Answers) -> Flask:
    app = create_app(Config(policy="dynamic"))
    connect(service(app), dataclasses.replace(fake_engine(model), what_if=answers))
    return app


def test_a_question_reaches_the_simulations_and_the_answer_comes_as_it_is(app: Flask, answers: Answers) -> None:
    reply = app.test_client().post("/what-if", json={"policies": ["static", "dynamic+sjf"], "count": 9, "what": 1})
    assert reply.data == b'{"lanes":[]}\n'
    assert reply.mimetype == "application/json"
    assert reply.headers["X-Ignored-Params"] == "what"
    assert answers.asked == [(["static", "dynamic+sjf"], {}, 9, None, None)]


def test_the_requests_of_the_last_load_are_those_that_arrived_during_it(app: Flask, answers: Answers) -> None:
    client = app.test_client()
    assert "POST /load" in error(client.post("/what-if", json={"requests": "load"}), 404)["message"]
    client.post("/load", json={"count": 3, "min_tokens": 2, "max_tokens": 4})
    wait_until(lambda: not client.get("/load").get_json()["active"])
    assert client.post("/what-if", json={"requests": "load"}).status_code == 200
    ((*_, span, _),) = answers.asked
    assert 0 < span[0] <= span[1]


@pytest.mark.parametrize(
    "fields",
    [{"policies": ["static"] * 7}, {"count": 401}, {"requests": "all"}, {"workload": "trace:/etc/passwd"}, {"rate": 0},
     {"policies": "static"}, {"options": ["gamma"]}, {"options": {"dynamic+boost": {"gamma": [1]}}}],
)  # fmt: skip
def test_a_question_is_bounded(app: Flask, answers: Answers, fields: dict[str, Any]) -> None:
    error(app.test_client().post("/what-if", json=fields), 400)
    assert answers.asked == []


def test_a_policy_may_have_options(app: Flask, answers: Answers) -> None:
    asked: dict[str, Any] = {"policies": ["dynamic+boost"], "options": {"dynamic+boost": {"gamma": 0.1, "w_p": "1"}}}
    assert app.test_client().post("/what-if", json=asked).status_code == 200
    assert answers.asked[0][:2] == (["dynamic+boost"], asked["options"])
    asked["options"] = {"dynamic+boost": {"gamma": -1}}
    wrong = error(app.test_client().post("/what-if", json=asked), 400)
    assert wrong["param"] == "options"
    assert "gamma is -1" in wrong["message"]
    assert len(answers.asked) == 1


@pytest.mark.parametrize("name", ["statik", "./mine"])
def test_a_policy_that_the_server_does_not_have_is_not_found(app: Flask, answers: Answers, name: str) -> None:
    assert error(app.test_client().post("/what-if", json={"policies": [name]}), 404)["param"] == "policies"
    assert answers.asked == []


@pytest.mark.parametrize(
    ("kind", "status"),
    [("overloaded", 429), ("timeout_error", 504), ("not_found_error", 404), ("unavailable_error", 503)],
)
def test_a_failure_has_its_status_and_words(app: Flask, answers: Answers, kind: str, status: int) -> None:
    answers.fails = InferenceError(kind, "the simulation failed. Try again")
    refusal = error(app.test_client().post("/what-if", json={}), status)
    assert (refusal["type"], refusal["message"]) == (kind, "the simulation failed. Try again")


def test_a_server_without_simulations_says_so(model: FakeModel) -> None:
    client = create_app(Config(), fake_engine(model)).test_client()
    error(client.post("/what-if", json={}), 404)


def test_a_finished_request_links_to_who_made_it_wait(app: Flask, answers: Answers) -> None:
    client = app.test_client()
    headers = {"X-Request-Id": "mine"}
    client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2, "n": 2}, headers=headers)
    choices = client.get("/requests/mine").get_json()["choices"]
    assert [choice["blame"] for choice in choices] == ["/requests/mine/blame", "/requests/mine/1/blame"]
    assert client.get(choices[1]["blame"]).data == b'{"others":[]}\n'
    assert answers.asked == ["mine/1"]
    answers.fails = InferenceError("unavailable_error", "they still run. Try again", 3)
    error(client.get(choices[0]["blame"]), 503)


@pytest.mark.process
@pytest.mark.full
def test_a_server_says_which_request_made_another_one_wait(tmp_path: Path) -> None:
    flags = ("--model", "mock:llm-mock", "--max-batch-size", "8")
    with Server(tmp_path / "log", "nobatch", *flags) as server:

        def load(*tokens: int) -> None:
            """Send requests one after the other, without waiting for their answers."""
            jobs = []
            with ThreadPoolExecutor(len(tokens)) as pool:
                for i, count in enumerate(tokens):
                    body = {"prompt": "hi", "max_tokens": count, "ignore_eos": True, "user": f"u{i}"}
                    headers = {"Content-Type": "application/json", "X-Request-Id": f"r{i}-{len(tokens)}"}
                    send = partial(server.send, "POST", "/v1/completions", json.dumps(body).encode(), **headers)
                    jobs.append(pool.submit(send))
                    wait_until(lambda: server.send("GET", f"/requests/r{i}-{len(tokens)}").status == 200)  # noqa: B023
            assert [job.result().status for job in jobs] == [200] * len(tokens)

        load(20, 90, 20, 10)
        record = server.send("GET", "/requests/r3-4").json
        answer = server.send("GET", record["blame"]).json
        waited = 1000 * (record["scheduled_at"] - record["arrived_at"])
        said = answer["others"][0]["wait_ms"]
        assert answer["others"][0]["client"] == "u1"
        assert said > 0.4 * waited
        sums = sum(other["wait_ms"] for other in answer["others"]) + answer["wait_ms"]["residual"]
        assert sums == pytest.approx(answer["wait_ms"]["simulated"] - answer["wait_ms"]["alone"], abs=0.1)
        load(20, 20, 10)  # the same without the worst
        record = server.send("GET", "/requests/r2-3").json
        shorter = waited - 1000 * (record["scheduled_at"] - record["arrived_at"])
        assert shorter == pytest.approx(said, rel=0.5)  # as far as a busy machine may change its speed meanwhile


@pytest.mark.process
@pytest.mark.full
def test_a_server_tells_what_others_would_have_made_of_its_load(tmp_path: Path) -> None:
    flags = ("--model", "mock:llm-mock@10", "--max-batch-size", "8")
    with Server(tmp_path / "log", "static", *flags) as server:
        as_json = {"Content-Type": "application/json"}
        assert server.send("POST", "/what-if", b"{}", **as_json).status == 404
        load = {"count": 40, "min_tokens": 4, "max_tokens": 60, "seed": 2}
        server.send("POST", "/load", json.dumps(load).encode(), **as_json)
        wait_until(lambda: not server.send("GET", "/load").json["active"], 60)
        reply = server.send("POST", "/what-if", b'{"requests": "load"}', **as_json)
        answer = reply.json
        assert reply.status == 200
        assert len(reply.body) < 2 << 20
        assert max(map(abs, answer["error"].values())) < 0.25  # as far as a busy machine may change its speed
        lanes = {(lane["policy"], lane["measured"]): lane for lane in answer["lanes"]}
        assert list(lanes) == [("static", True), ("static", False), ("nobatch", False), ("dynamic", False)]
        assert [lane["requests"] for lane in answer["lanes"]] == [40] * 4
        assert lanes["static", True]["held"] == pytest.approx(lanes["static", False]["held"], abs=0.03)
        assert lanes["static", False]["held"] > 0.1
        assert lanes["dynamic", False]["held"] == 0
        assert lanes["dynamic", False]["latency_mean_s"] < 0.9 * lanes["static", False]["latency_mean_s"]
