"""Another policy for a server that runs: who waits or runs loses nothing by it, and everything that looks in says so."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from calls import engine_of
from flask import Flask
from flask.testing import FlaskClient
from hypothesis import given
from hypothesis import strategies as st

import policies
from app import create_app, load_engine
from batching import BatchingManager, Inference, InferenceError
from config import Config
from costs.mock import MockModel
from costs.published import Constant
from scheduling.pages import PagePool
from scheduling.policy import Policy
from tests.support import in_background, wait_until
from tests.support.checkpoints import write_checkpoint
from tests.support.fakes import FakeModel, fake_engine

ALL = [*policies.names(), *(f"dynamic+{order}" for order in policies.order_names() if order != "rpm")]


@pytest.fixture(scope="module")
def shared_app() -> Flask:
    return create_app(Config(policy="dynamic", max_batch_size=8, max_queue=8, access_log=False))


def ask(client: FlaskClient, n: int = 3) -> Any:
    return client.post("/inference", json={"prompt": "hi", "num_tokens": n}).get_json()


def test_the_answer_comes_when_the_policy_has_changed(client: FlaskClient) -> None:
    reply = client.put("/policy", json={"policy": "dynamic+priority", "options": {"aging": 30}})
    assert reply.status_code == 200, reply.text
    wanted = {"policy": "dynamic+priority", "options": {"aging": 30.0, "reserve": "all"}, "max_batch_size": 8}
    assert reply.get_json() == wanted
    known = client.get("/policy").get_json()
    assert wanted.items() <= known.items()
    assert set(known["policies"]) == set(policies.names())
    assert known["policies"]["dynamic"].startswith("Dynamic batching")
    assert set(known["orders"]) == set(policies.order_names())
    assert known["orders"]["sjf"].startswith("Shortest job first")


def test_it_tells_what_a_form_needs_to_show_the_options(client: FlaskClient) -> None:
    known = client.get("/policy").get_json()
    assert {name: set(known["options_of"][name]) for name in known["options_of"]} == {
        "policies": set(policies.names()), "orders": set(policies.order_names()),
    }  # fmt: skip
    window, vtc = known["options_of"]["policies"]["window"], known["options_of"]["orders"]["vtc"]
    assert {item["name"]: item["type"] for item in window} == {"delay": "number", "preferred": "list"}
    assert (window[0]["minimum"], window[0]["default"]) == (0.0, "0.0")
    assert next(item["choices"] for item in vtc if item["name"] == "cost") == ["linear", "profile"]
    assert all(item["help"] and item["bounds"] for items in known["options_of"]["orders"].values() for item in items)
    assert {"nobatch", "static", "elastic"} <= set(known["closed"])
    assert "dynamic" not in known["closed"]


def test_all_that_looks_in_tells_the_new_policy(fresh: Flask) -> None:
    client, service = fresh.test_client(), fresh.extensions["service"]
    client.put("/policy", json={"policy": "nobatch"})
    ask(client)
    assert client.get("/stats").get_json()["policy"] == "nobatch"
    assert client.get("/health").get_json()["policy"] == "nobatch"
    assert client.get("/info").get_json()["policy"] == "nobatch"
    assert 'eb_policy_info{policy="nobatch"} 1.0' in client.get("/metrics").text
    assert len(client.get("/slots").get_json()) == 1
    kinds = [entry.kind for entry in service.feed.entries()]
    assert kinds.index("policy") < kinds.index("step")
    frames = b"".join(entry.frame for entry in service.feed.entries()).decode()
    assert '"policy":"nobatch","options":{},"max_batch_size":1,"max_queue":8' in frames
    assert '"policy":"dynamic"' not in frames


def test_as_many_requests_may_wait_under_every_policy(client: FlaskClient, app: Flask) -> None:
    manager = engine_of(app).manager
    for name in ("nobatch", "static", "nobatch", "dynamic"):
        client.put("/policy", json={"policy": name})
        assert manager.max_batch_size == policies.get_policy(name, 8).max_batch_size
        assert manager.max_queue == 8
        assert manager.slots == 8


@pytest.mark.parametrize("options", [{"predicter": "mean"}, {"predictor": "x"}, {"self": 1}, {"max_batch_size": 2}, 3])
def test_a_wrong_option_is_named_as_such(client: FlaskClient, options: Any) -> None:
    reply = client.put("/policy", json={"policy": "dynamic+sjf", "options": options})
    assert (reply.status_code, reply.get_json()["error"]["param"]) == (400, "options")
    assert client.get("/policy").get_json()["policy"] == "dynamic"


def test_nothing_from_the_network_is_run_or_looked_for(client: FlaskClient, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    own = tmp_path / "mine.py"
    own.write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\nfrom policies.dynamic import Policy\n")
    assert policies.get_policy(str(own), 2).max_batch_size == 2
    mark.unlink()
    for name in (str(own), f"{own}+sjf", f"dynamic+{own}", "policies.dynamic", "costs.mock"):
        reply = client.put("/policy", json={"policy": name})
        assert reply.status_code == 400
        assert reply.get_json()["error"]["param"] == "policy"
        assert "loaded at the start only" in reply.text
    assert not mark.exists()


def test_it_needs_the_key_and_no_page_of_another_site() -> None:
    client = create_app(Config(api_key="k"), fake_engine()).test_client()
    key = {"Authorization": "Bearer k"}
    assert client.put("/policy", json={"policy": "static"}).status_code == 401
    assert client.get("/policy").status_code == 401
    elsewhere = {**key, "Sec-Fetch-Site": "cross-site"}
    assert client.put("/policy", json={"policy": "static"}, headers=elsewhere).status_code == 403
    reply = client.put("/policy", json={"policy": "static"}, headers=key)
    assert reply.get_json()["policy"] == "static"


def test_who_runs_goes_on_and_is_answered_in_full(client: FlaskClient, app: Flask, model: FakeModel) -> None:
    """The switch waits for the step under way, and comes before the next."""
    model.gate.clear()
    with in_background(lambda: ask(client, 6)) as answers:
        wait_until(lambda: model.plans)
        with in_background(lambda: client.put("/policy", json={"policy": "static"})) as replies:
            assert not replies
            model.gate.set()
        assert replies[0].status_code == 200
    assert answers[0]["completion"] == "hiabcdef"
    assert engine_of(app).manager.policy_name == "static"


def test_a_step_that_does_not_end_leaves_the_policy_as_it_is(model: FakeModel) -> None:
    model.gate.clear()
    manager = fake_engine(model).manager
    one = manager.enqueue("hi", 4, prompt_ids=[1])
    wait_until(lambda: model.plans)
    with pytest.raises(InferenceError, match="has not ended within"):
        manager.inbox.switch(policies.get_policy("static", 8), timeout=0.01)
    model.gate.set()
    assert one.wait_for_completion(60)
    assert manager.policy_name == "dynamic"
    manager.stop()


def test_when_the_loop_has_ended_nobody_waits_for_a_switch(model: FakeModel) -> None:
    manager = fake_engine(model).manager
    manager.stop()
    wait_until(lambda: not manager.is_alive)
    with pytest.raises(InferenceError, match="shutting down"):
        manager.inbox.switch(policies.get_policy("static", 8))


def served(name: str, slots: int, step: float = 0.0) -> tuple[BatchingManager, MockModel]:
    """Return a loop on a model without weights, whose tokens depend on prompt and place alone, with few pages."""
    model = MockModel(Constant(step, 0.0))
    manager = BatchingManager(model, pages=PagePool(40, 4, salt="test"), max_batch_size=slots, max_queue=1000)
    manager.start(policies.get_policy(name, slots))
    return manager, model


def alone(model: MockModel, prompt: list[int], n: int) -> list[int]:
    """Return what the model says to a prompt when nobody else is there."""
    one = Inference("", n, prompt)
    for _ in range(n):
        one.add_token(model.token(one.sequence))
    return one.output_ids


def test_under_load_all_policies_in_turn_lose_nobody_and_change_no_text() -> None:
    manager, model = served("nobatch", 4, step=0.0002)
    over = threading.Event()

    def client(number: int) -> int:
        done = 0
        while not over.is_set():
            prompt = [number % 3, 5, done % 7, *range(number % 11)]
            n = 1 + (number + done) % 9
            one = manager.enqueue(Inference("", n, prompt, client="ab"[number % 2]))
            one.wait_for_completion(60)
            assert one.output_ids == alone(model, prompt, n)
            done += 1
        return done

    with ThreadPoolExecutor(12) as pool:
        clients = [pool.submit(client, i) for i in range(12)]
        try:
            for name in [*ALL, *reversed(ALL)]:
                before = manager.scheduler.number if manager.scheduler else 0
                manager.inbox.switch(policies.get_policy(name, 4, options=QUICK.get(name)), timeout=60)
                assert manager.policy_name == name
                wait_until(lambda at=before: manager.scheduler.number > at + 3)
        finally:
            over.set()
        manager.inbox.switch(policies.get_policy("dynamic", 4))  # one that waits for nobody
        assert sum(done.result(60) for done in clients) > 12
    assert manager.pages is not None
    wait_until(lambda: manager.pages.used == 0 and manager.running == 0)
    manager.stop()


def test_a_real_model_says_the_same_under_whatever_policy(tmp_path: Path) -> None:
    """Greedy, with a prefix cache that prompts share, and switches between any two steps."""
    tiny = {"dtype": "float32", "max_batch_size": 4, "max_tokens_per_step": 16, "compute_threads": 1}
    config = Config(policy="dynamic", model=str(write_checkpoint(tmp_path / "m", 128)), device="cpu", **tiny)
    manager, prompts = load_engine(config).manager, [f"the house {'of the king ' * (i % 4)}{i}" for i in range(12)]

    def enqueue(prompt: str) -> Inference:
        return manager.enqueue(prompt, 12, temperature=0.0)

    wanted = [enqueue(prompt).wait_for_completion(60) for prompt in prompts]
    made = [enqueue(prompt) for prompt in prompts * 2]
    for name in ALL:
        manager.inbox.switch(policies.get_policy(name, 4, options=QUICK.get(name)), timeout=60)
    assert [one.wait_for_completion(60) for one in made] == wanted * 2
    manager.stop()


# Policies that wait for company do so for a moment only, where nobody may come.
QUICK: dict[str, dict[str, object]] = {name: {"flush": 0.01} for name in ("fixed", "multibin", "static-global")}


@given(
    st.lists(st.tuples(st.sampled_from(ALL), st.integers(1, 6)), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 10)), min_size=1, max_size=20),
)
def test_switches_at_any_moment_lose_nobody(switches: list[tuple[str, int]], requests: list[tuple[int, int]]) -> None:
    """Requests come from one thread and switches from another, as the machine has it."""
    manager, model = served("dynamic", 3)
    prompts = [([i % 2, *range(size)], n) for i, (size, n) in enumerate(requests)]

    def change() -> None:
        made: list[Policy] = [policies.get_policy(name, slots, options=QUICK.get(name)) for name, slots in switches]
        for policy in [*made, policies.get_policy("dynamic", 3)]:
            manager.inbox.switch(policy, timeout=60)

    with in_background(change):
        made = [manager.enqueue(Inference("", n, prompt)) for prompt, n in prompts]
    for inference, (prompt, n) in zip(made, prompts):
        inference.wait_for_completion(60)
        assert inference.output_ids == alone(model, prompt, n)
    manager.stop()
