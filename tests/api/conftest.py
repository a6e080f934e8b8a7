"""The apps that the tests of the API share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from calls import Tiny, service
from flask import Flask
from support import FakeModel, fake_engine, wait_until
from tiny_checkpoint import write_checkpoint

from app import connect, create_app, load_engine
from config import Config


@pytest.fixture
def app(model: FakeModel) -> Iterator[Flask]:
    app = create_app(Config(policy="dynamic"))
    engine = fake_engine(model)
    connect(service(app), engine)
    yield app
    engine.manager.stop()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    config = Config(policy="dynamic", model=str(folder), compute_threads=1, kv_memory=64 << 20, access_log=False)
    app = create_app(config)
    engine = load_engine(config)
    wait_until(lambda: engine.manager.is_alive)
    connect(service(app), engine)
    yield app.test_client(), engine
    engine.manager.stop()
