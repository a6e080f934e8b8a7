"""--dedup: which requests share an answer, and how an answer says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from calls import service
from dialects import events
from flask.testing import FlaskClient

from app import connect, create_app
from batching import BatchingManager, Inference
from config import Config
from launch.engine import load_engine
from scheduling.iteration import Plan
from scheduling.scheduler import Output
from tests.support import wait_until

Start = Callable[[str], FlaskClient]
ASKED: dict[str, Any] = {"prompt": "ROMEO:", "max_tokens": 40, "temperature": 0}


@pytest.fixture
def start() -> Iterator[Start]:
    engines = []

    def started(dedup: str) -> FlaskClient:
        config = Config(policy="dynamic", model="mock:llm-mock@1000", dedup=dedup, access_log=False)
        app = create_app(config)
        engines.append(load_engine(config))
        hold_the_first(engines[-1].manager)
        connect(service(app), engines[-1])
        return app.test_client()

    yield started
    for engine in engines:
        engine.manager.stop()


def hold_the_first(manager: BatchingManager) -> None:
    """Let a request that is alone compute no more than its first token until another one has come."""
    deliver, forward, delivered = manager.inbox.deliver, manager.model.forward, []

    def noted(inferences: list[Inference]) -> bool:
        is_open = deliver(inferences)
        delivered.extend(inferences)
        return is_open

    def held(plan: Plan) -> list[Output]:
        if any(seq.output_ids for seq in plan.sequences):
            wait_until(lambda: len(delivered) % 2 == 0)
        return forward(plan)

    manager.inbox.deliver, manager.model.forward = noted, held  # type: ignore[method-assign]


def shared(client: FlaskClient, fields: dict[str, Any], key: str = "", **changed: Any) -> bool:
    """Whether a request shares the answer of one that is in flight, with the same text then."""
    keys = [{"Authorization": f"Bearer {one}"} if key else {} for one in ("one", key)]
    first = client.post("/v1/completions", json=ASKED | fields | {"stream": True}, headers=keys[0])
    response = client.post("/v1/completions", json=ASKED | fields | changed, headers=keys[1])
    assert response.status_code == 200
    text = response.get_json()["choices"][0]["text"]
    if "X-Deduplicated" in response.headers:
        assert response.headers["X-Deduplicated"] == "1"
        assert text == "".join(event["choices"][0]["text"] for event in events(first.text)) != ""
    first.close()
    return "X-Deduplicated" in response.headers


def test_an_equal_request_in_flight_is_computed_once_and_the_answer_says_so(start: Start) -> None:
    client = start("per-key")
    assert shared(client, {})
    assert shared(client, {}, seed=5)  # without randomness a seed has no effect
    assert shared(client, {"temperature": 1, "seed": 5})
    counted = client.get("/stats").get_json()
    assert counted["deduplicated"] == {"requests": 3, "tokens": 120}
    assert counted["total-tokens-handled"] >= 120
    metrics = client.get("/metrics").text
    assert "eb_deduplicated_requests_total 3.0" in metrics
    assert "eb_deduplicated_tokens_total 120.0" in metrics


def test_an_equal_input_is_embedded_once(start: Start) -> None:
    client = start("per-key")
    reply = client.post("/v1/embeddings", json={"input": ["a", "b", "a"]}).get_json()
    first, other, copy = (item["embedding"] for item in reply["data"])
    assert first == copy != other
    assert client.get("/stats").get_json()["deduplicated"]["requests"] == 1


@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        ({}, {"prompt": "JULIET:"}),
        ({}, {"max_tokens": 39}),
        ({}, {"stop": ["x"]}),
        ({}, {"logprobs": 1}),
        ({}, {"ignore_eos": True}),
        ({"temperature": 1}, {}),
        ({"temperature": 1, "seed": 5}, {"seed": 6}),
        ({}, {"priority": -1}),
        ({}, {"user": "someone"}),
        ({}, {"program": "another"}),
    ],
    ids=str,
)
def test_a_request_that_differs_is_computed_itself(
    start: Start, fields: dict[str, Any], changed: dict[str, Any]
) -> None:
    assert not shared(start("all"), fields, **changed)


@pytest.mark.parametrize(("dedup", "key", "expected"), [
    ("per-key", "one", True), ("per-key", "two", False), ("all", "two", True), ("off", "one", False),
])  # fmt: skip
def test_nothing_is_shared_between_keys_unless_that_is_allowed(
    start: Start, dedup: str, key: str, expected: bool
) -> None:
    assert shared(start(dedup), {}, key=key) is expected


def test_equal_choices_of_one_request_are_computed_once(start: Start) -> None:
    client = start("per-key")
    response = client.post("/v1/completions", json=ASKED | {"n": 4})
    assert response.headers["X-Deduplicated"] == "3"
    assert len({choice["text"] for choice in response.get_json()["choices"]}) == 1


def test_a_copied_stream_has_all_of_the_text_and_names_its_first(start: Start) -> None:
    client = start("per-key")
    asked = {"prompt": "hi", "num_tokens": 30, "temperature": 0, "stream": True}
    first, copy = (client.post("/inference", json=asked, headers={"X-Request-Id": id}) for id in ("first", "copy"))
    assert copy.headers["X-Deduplicated"] == "1"
    texts = ["".join(event["text"] for event in events(stream.text)) for stream in (copy, first)]
    assert texts[0] == texts[1] != ""
    assert client.get("/requests/copy").get_json()["computed_as"] == "first"
