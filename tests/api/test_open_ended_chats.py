"""Chats without max_tokens over HTTP: KV pages for 21 whole contexts serve 64 of them at once."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from calls import connected
from flask import Flask
from flask.testing import FlaskClient
from openai_calls import USER, chat

from app import create_app
from config import Config
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from tests.support import wait_until
from tests.support.fakes import FakeModel, fake_engine

CHATS, CONTEXTS = 64, 21


@pytest.fixture
def app(model: FakeModel) -> Iterator[Flask]:
    many: dict[str, int] = {"max_batch_size": CHATS, "max_queue": CHATS}
    engine = fake_engine(model, **many, pages=PagePool(CONTEXTS * 1024 // 16 + 1, 16))  # type: ignore[arg-type]
    yield from connected(create_app(Config(policy="dynamic", access_log=False, **many)), engine)  # type: ignore[arg-type]


def running(client: FlaskClient) -> int:
    found = re.search(r"^vllm:num_requests_running(?:\{.*\})? ([\d.]+)$", client.get("/metrics").text, re.M)
    assert found
    return int(float(found[1]))


@pytest.mark.parametrize(("max_tokens", "most"), [(None, CHATS), (1000, CONTEXTS)])
def test_64_chats_run_at_once_if_they_name_no_length(
    app: Flask, model: FakeModel, max_tokens: int | None, most: int
) -> None:
    model.says = list(b" Yes, of course.\nUser: and more")
    arrived, seen = threading.Event(), threading.Event()
    manager = app.extensions["service"].engine.manager

    def hold(plan: Plan) -> None:
        assert arrived.wait(60)
        assert plan.number < 3 or seen.wait(60)

    model.before = hold
    with ThreadPoolExecutor(CHATS) as pool:
        replies = [pool.submit(chat, app.test_client(), USER, max_tokens=max_tokens) for _ in range(CHATS)]
        wait_until(lambda: manager.waiting + manager.running == CHATS)
        arrived.set()
        wait_until(lambda: model.plans == 3)
        at_once = running(app.test_client())
        seen.set()
        answers = [reply.result().get_json()["choices"][0] for reply in replies]
    assert at_once == most
    assert {(answer["message"]["content"], answer["finish_reason"]) for answer in answers} == {
        (" Yes, of course.", "stop")
    }
