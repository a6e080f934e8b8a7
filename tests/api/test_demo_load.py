"""The endless load of the live page: users who each wait for an answer before they ask again."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient

from api.pages.demo import LONG, SHARED, Load, asked_by
from api.schemas.demo import LoadRequest
from api.service import LoadedEngine
from app import create_app
from config import Config
from tests.support import wait_until
from tests.support.fakes import FakeModel, fake_engine

USERS = {"users": 5, "pause": 0.0, "min_tokens": 2, "max_tokens": 4, "seed": 9}


@pytest.fixture
def engine() -> Iterator[LoadedEngine]:
    engine = fake_engine(max_batch_size=2)
    yield engine
    engine.manager.stop()


@pytest.fixture
def app(engine: LoadedEngine) -> Flask:
    return create_app(Config(demo=True), engine)


def end(client: FlaskClient) -> dict[str, Any]:
    client.delete("/load")
    wait_until(lambda: not client.get("/load").get_json()["active"])
    body: dict[str, Any] = client.get("/load").get_json()
    return body


def test_users_ask_again_and_again_but_never_twice_at_once(client: FlaskClient, engine: LoadedEngine) -> None:
    open_ids: list[int] = []
    engine.manager.listeners.append(lambda _: open_ids.append(engine.manager.waiting + engine.manager.running))
    assert client.post("/load", json=USERS).get_json()["params"]["users"] == 5
    wait_until(lambda: client.get("/load").get_json()["done"] > 50)
    last = end(client)
    assert last["sent"] == last["done"] > 50
    assert last["failed"] == 0
    assert max(open_ids) <= 5


def test_one_load_replaces_another_only_if_asked_to(client: FlaskClient) -> None:
    client.post("/load", json=USERS)
    assert client.post("/load", json={**USERS, "seed": 10}).status_code == 429
    assert client.post("/load", json={**USERS, "seed": 10, "replace": True}).get_json()["seed"] == 10
    end(client)


def test_the_same_seed_asks_the_same_and_another_seed_something_else(engine: LoadedEngine) -> None:
    def questions(seed: int) -> list[list[int]]:
        params = LoadRequest(users=2, seed=seed)
        return [q.prompt.ids for user in range(2) for q in itertools.islice(asked_by(user, engine, params), 20)]

    assert questions(3) == questions(3) != questions(4)
    starts = [tuple(ids[:16]) for ids in questions(3)]
    assert len(set(starts)) == len(starts)  # so that none is in the prefix cache by chance


def test_every_fourth_prompt_is_long_or_has_a_beginning_of_its_own(engine: LoadedEngine) -> None:
    def prompts(kind: Any) -> list[list[int]]:
        params = LoadRequest(users=1, prompts=kind)
        return [question.prompt.ids for question in itertools.islice(asked_by(0, engine, params), 200)]

    assert 30 < sum(len(ids) == LONG for ids in prompts("long")) < 70
    assert sum(len(ids) > SHARED for ids in prompts("short")) == 0
    shared = prompts("shared")
    usual = max((tuple(ids[:SHARED]) for ids in shared), key=[tuple(ids[:SHARED]) for ids in shared].count)
    assert 130 < sum(tuple(ids[:SHARED]) == usual for ids in shared) < 170


def test_quiet_and_loud_users_are_two_clients_with_ids_that_say_so(client: FlaskClient, engine: LoadedEngine) -> None:
    came: list[tuple[str, str]] = []
    engine.manager.listeners.append(lambda inference: came.append((inference.id, inference.sequence.client)))
    client.post("/load", json={**USERS, "quiet_users": 1})
    wait_until(lambda: len(came) > 20)
    end(client)
    assert {client for _, client in came} == {"quiet", "loud"}
    assert all(id.partition("-")[0] == client for id, client in came)
    assert len({id for id, _ in came}) == len(came)


def test_a_load_that_nobody_wants_any_more_ends(engine: LoadedEngine) -> None:
    wanted = threading.Event()
    wanted.set()
    load = Load()
    load.start(engine, LoadRequest(**USERS), wanted.is_set)
    wait_until(lambda: load.progress()["done"] > 5)
    wanted.clear()
    wait_until(lambda: not load.progress()["active"])


def test_a_load_with_a_lease_ends_when_nobody_asks_for_it(engine: LoadedEngine) -> None:
    load, left = Load(), threading.Event()
    load.left = left.set
    load.start(engine, LoadRequest(**USERS, lease=60))
    wait_until(lambda: load.progress()["done"] > 5)
    assert not left.is_set()
    load.start(engine, LoadRequest(**USERS, lease=0.01, replace=True))
    assert left.wait(60)
    wait_until(lambda: not load.progress()["active"])


def test_a_load_that_is_stopped_is_not_left(engine: LoadedEngine) -> None:
    load, left = Load(), threading.Event()
    load.left = left.set
    load.start(engine, LoadRequest(**USERS))
    load.stop()
    wait_until(lambda: not load.progress()["active"])
    assert not left.is_set()


def test_refused_requests_count_as_failed_and_are_tried_again() -> None:
    model = FakeModel()
    model.gate.clear()
    engine = fake_engine(model, max_batch_size=1, max_queue=1)
    load = Load()
    load.start(engine, LoadRequest(**USERS))
    wait_until(lambda: load.progress()["failed"] >= 3)
    model.gate.set()
    wait_until(lambda: load.progress()["done"] >= 2)
    load.stop()
    wait_until(lambda: not load.progress()["active"])
    engine.manager.stop()


@pytest.mark.parametrize(
    "fields", [{"users": 257}, {"users": 3, "pause": -1}, {"prompts": "odd"}, {"quiet_users": 1.5}]
)
def test_it_is_bounded(client: FlaskClient, fields: dict[str, Any]) -> None:
    assert client.post("/load", json=fields).status_code == 400
