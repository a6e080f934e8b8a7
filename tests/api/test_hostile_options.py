"""Every option of every policy and order with values that its arithmetic may not take, over PUT /policy.

A value is refused, or the policy serves requests with it: the loop goes on, no request is lost, and each is answered or
turned away as the policy documents.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient

import policies
from api.service import LoadedEngine
from app import create_app
from batching import Inference, InferenceError
from config import Config
from scheduling.pages import PagePool
from tests.support.fakes import FakeModel, fake_engine

HUGE = str(1 << 60)  # the largest number that an option without a bound of its own takes
TEXTS = ["0", "-1", "1", "1e308", "5e-324", "nan", "", HUGE, "1," * 120]
REST = ["-1e308", "inf", "a:5e-324", "9" * 250, "-inf", "1e-300", "-" + HUGE, "on", "x" * 256, "x" * 1_000_000, float("inf"), float("nan"), True, None,
        [[1]], {"a": {}}]  # fmt: skip
# What an option needs to matter.
WITH = {
    "sigma": {"predictor": "noisy"}, "error": {"predictor": "uniform"}, "recent": {"predictor": "mean"},
    **{option: {"predictor": "classes"} for option in ("classes", "longest", "accuracy")},
}  # fmt: skip
WAITS = {"flush": "0.01", "delay": "0.01"}  # instead of seconds
NAMES = [*policies.names(), *(f"dynamic+{order}" for order in policies.order_names())]


class World:
    """A server on a fake model whose KV memory is small."""

    def __init__(self) -> None:
        self.engine: LoadedEngine = fake_engine(FakeModel(), max_batch_size=3, max_queue=64, pages=PagePool(12, 4))
        config = Config(policy="dynamic", max_batch_size=3, access_log=False)
        self.client: FlaskClient = create_app(config, self.engine).test_client()

    def put(self, name: str, options: dict[str, Any]) -> bool:
        """Switch; return whether the server took the options, and else refused them in a few words."""
        body = json.dumps({"policy": name, "options": options})  # with numbers that JSON does not have
        reply = self.client.put("/policy", data=body, content_type="application/json")
        assert reply.status_code in (200, 400), (options, reply.text)
        assert reply.status_code == 200 or len(reply.get_json()["error"]["message"]) < 600
        return reply.status_code == 200

    def send(self) -> list[Inference]:
        shapes = [(9, 3), (1, 8), (4, 1), (12, 2), (2, 6)]
        return [
            self.engine.manager.enqueue(
                Inference("", n, [i % 2] * size, sampling={}, client="ab"[i % 2], priority=i % 3, deadline=i or None)
            )
            for i, (size, n) in enumerate(shapes)
        ]

    def check(self, name: str, option: str, value: Any) -> None:
        """Switch to this value, twice while requests run and wait, and see that each request has its outcome."""
        waits = {name: "0.01" for name in options_of(name) if name in WAITS}
        options = {**waits, **WITH.get(option, {}), option: WAITS.get(option, value) if value == "1" else value}
        if not self.put(name, options):
            return
        sent = self.send()
        assert self.put(name, options)
        sent += self.send()
        refuses = policies.get_policy(name, 3, options).claims.refuses
        outcomes = {outcome_of(one) for one in sent}
        allowed = {"answered", *(("overloaded", "timeout_error") if refuses else ())}
        assert outcomes <= allowed, (name, options, outcomes)


def options_of(name: str) -> list[str]:
    return [str(field["name"]) for field in policies.form_of(name)]


def outcome_of(one: Inference) -> str:
    """Return "answered" for a request that gets exactly its tokens, or what it ends with."""
    try:
        one.wait_for_completion(60)
    except InferenceError as error:
        return error.kind
    return "answered" if len(one.output_ids) == one.num_tokens else f"{len(one.output_ids)} tokens"


@pytest.fixture(scope="module")
def world() -> Any:
    made = World()
    yield made
    assert made.engine.manager.is_alive
    assert made.put("dynamic", {})
    made.engine.manager.stop()


@pytest.mark.parametrize("name", NAMES)
def test_no_text_as_an_option_stops_a_server(world: World, name: str) -> None:
    for option in options_of(name):
        for value in TEXTS:
            world.check(name, option, value)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_no_value_as_an_option_stops_a_server(world: World, name: str) -> None:
    for option in options_of(name):
        for value in REST:
            world.check(name, option, value)
