"""The apps that the tests of the API share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from calls import Talk, Tiny, connected, service
from flask import Flask
from flask.testing import FlaskClient

from api import generation
from api.dialects import tools
from api.schemas.forms import Form
from api.service import LoadedEngine
from app import connect, create_app, load_engine
from config import Config
from tests.support import wait_until
from tests.support.checkpoints import write_checkpoint
from tests.support.fakes import FakeModel, fake_engine
from tests.support.tokenizers import with_template


@pytest.fixture(scope="module")
def shared_app() -> Flask:
    """Return one app for a file, which takes ten times as long to make as an engine. What it counts goes on counting."""
    return create_app(Config(policy="dynamic", access_log=False))


@pytest.fixture
def app(shared_app: Flask, model: FakeModel) -> Iterator[Flask]:
    yield from connected(shared_app, fake_engine(model))


@pytest.fixture
def prompts(model: FakeModel) -> list[str]:
    """Return the prompts that a model of bytes computes."""
    found: list[str] = []
    model.before = lambda plan: found.append(bytes(plan.sequences[0].prompt_ids).decode())
    return found


@pytest.fixture
def drawn(model: FakeModel) -> list[dict[str, Any]]:
    """Return how each token is drawn."""
    found: list[dict[str, Any]] = []
    model.before = lambda plan: found.append(dict(plan.sequences[0].sampling))
    return found


@pytest.fixture
def family() -> str:
    """Return whose chat template the model has; a test may choose another."""
    return "qwen3"


@pytest.fixture
def talk(shared_app: Flask, model: FakeModel, family: str) -> Iterator[Talk]:
    talk = Talk(shared_app.test_client(), model, with_template(family), [])
    model.before = lambda plan: talk.prompts.append(talk.tokenizer.decode(plan.sequences[0].prompt_ids))
    talk.says("Hello.")
    for _ in connected(shared_app, fake_engine(model, tokenizer=talk.tokenizer)):
        yield talk


@pytest.fixture
def fresh(model: FakeModel) -> Iterator[Flask]:
    """Return an app that has counted nothing yet."""
    yield from connected(create_app(Config(policy="dynamic", max_batch_size=8, max_queue=8)), fake_engine(model))


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


class AskedForm(NamedTuple):
    """A form that an answer got, and the field that asked for it."""

    param: str
    form: Form
    compiled: Any


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> list[AskedForm]:
    """Return the forms that answers got."""
    found: list[AskedForm] = []

    def constraint(engine: LoadedEngine, param: str, form: Form) -> Any:
        compiled = generation.constraint(engine, param, form) if engine.grammars is not None else None
        found.append(AskedForm(param, form, compiled))
        return compiled

    monkeypatch.setattr(tools, "constraint", constraint)
    return found


@pytest.fixture(scope="module")
def mock() -> Iterator[FlaskClient]:
    """Return the client of a model without weights, whose answers have the form that is asked."""
    config = Config(policy="dynamic", model="mock:llm-mock@1000", demo=True, access_log=False)
    for app in connected(create_app(config), load_engine(config)):
        yield app.test_client()
