"""What all tests share: hypothesis profiles, one thread for tiny tensors, the order of the files, and common fixtures."""

import gc
import os
import signal

# Two compute threads on two busy cores wait for each other through whole scheduler quanta.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton's kernels run in its interpreter; it asks when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from hypothesis import HealthCheck, settings
from served import Serve, serving
from support import ROOT, FakeModel

pytest_plugins = ["skips"]
collect_ignore = [] if find_spec("ray") else ["fleet/test_ray.py"]  # ./test.sh --all installs it
COMPUTES = ("simulate", "generate", "policies", "scheduling")
SLOW_TO_IMPORT = {
    "transformers": ("support_checkpoints", "support_gguf", "from transformers"),
    "openai": ("official_client",),
}

# The default is quick; ./test.sh --all passes --hypothesis-profile full. A property that needs more examples than others
# takes a multiple of `settings.default.max_examples`.
settings.register_profile(
    "full",
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("quick", settings.get_profile("full"), max_examples=12)
settings.load_profile("quick")


def pytest_configure() -> None:
    """Accept Ctrl-C again where a shell started the tests in the background: the children inherit what is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # collecting the tests imports much and frees little


def pytest_collection_finish() -> None:
    """Exclude what the tests' modules hold from the search for garbage: thousands of classes and all of torch."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or Triton's library says at the end that its functions leaked


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that start servers first, then those that compute, so that no worker ends with a long file."""
    starts_servers = {item.path for item in items if item.get_closest_marker("process")}
    items.sort(key=lambda item: (item.path not in starts_servers, item.path.parent.name not in COMPUTES))


@cache
def unit_of(file: str) -> str:
    """Return what one worker of a quick run takes as a whole: a file, or all files that begin with the same slow import."""
    if file.startswith("tests/web/"):
        return "browser"
    text = (ROOT / file).read_text("utf-8")
    return next((name for name, words in SLOW_TO_IMPORT.items() if any(word in text for word in words)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run what is slow to start in one worker of a quick run."""
    from xdist.scheduler import LoadFileScheduling

    class SharedStart(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(super()._split_scope(nodeid))

    is_quick = config.getoption("dist") == "loadfile" and "not full" in config.getoption("markexpr")
    return SharedStart(config, log) if is_quick else None


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
