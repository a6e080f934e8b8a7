"""What all tests share: properties that run the same way everywhere, one thread for tiny tensors, how skips are told."""

import os

# Two compute threads on two busy cores wait for each other through whole scheduler quanta.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton's kernels run in its interpreter; it asks when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Iterator

import pytest
from flask import Flask
from flask.testing import FlaskClient
from hypothesis import HealthCheck, settings
from served import Serve, serving
from support import FakeModel

pytest_plugins = ["skips"]

settings.register_profile(
    "same-everywhere",
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("same-everywhere")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-minutes", type=float, default=1.0, help="how long the soak lasts")
    parser.addoption("--soak-policy", default="dynamic", help="the policy that is soaked")


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return what starts a manager on a fake model; the loops end with the test."""
    with serving() as start:
        yield start


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    """Return a client of the app that the test's own module makes."""
    return app.test_client()
