"""What all tests share: hypothesis profiles, one thread for tiny tensors, and common fixtures."""

import atexit
import gc
import os
import signal

# Two compute threads on two busy cores wait for each other through whole scheduler quanta.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton's kernels run in its interpreter; it asks when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from itertools import groupby, zip_longest
from operator import attrgetter

import pytest
from flask import Flask
from flask.testing import FlaskClient
from hypothesis import HealthCheck, settings

from tests.support.data import MORE
from tests.support.fakes import FakeModel
from tests.support.serving import Serve, serving

collect_ignore = [] if find_spec("ray") else ["integrations/ray/test_ray.py"]  # ./test.sh --all installs it

# The default is quick; ./test.sh --all passes --hypothesis-profile full. A property that needs more examples than others
# takes a multiple of `settings.default.max_examples`.
settings.register_profile(
    "full", max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)  # fmt: skip
settings.register_profile("quick", settings.get_profile("full"), max_examples=8)
settings.load_profile("quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that need more data where there is none; spread those that wait if xdist keeps the order."""
    if MORE is None:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("data")])
        items[:] = [item for item in items if not item.get_closest_marker("data")]
    if not config.getoption("loadscopereorder", True):
        items[:] = spread(items)


def spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return items file by file: one that starts servers, then one that computes, the large ones of these first.

    Otherwise all workers compute first, and in the end all wait while the cores idle.
    """
    files = [[*file] for _, file in groupby(items, attrgetter("path"))]
    waiting = [file for file in files if any(item.get_closest_marker("process") for item in file)]
    computing = sorted((file for file in files if file not in waiting), key=len, reverse=True)
    return [item for pair in zip_longest(waiting, computing, fillvalue=()) for file in pair for item in file]


def pytest_configure(config: pytest.Config) -> None:
    """Accept Ctrl-C again where a shell started the tests in the background: the children inherit what is ignored."""
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":  # xdist learns of a worker's death when its pipe is closed
            os.register_at_fork(after_in_child=partial(os.close, plugin.channel.gateway._io.outfile.fileno()))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # collecting the tests imports much and frees little
    # Or Triton's library says that its functions leaked; pytest's own searches come before.
    atexit.register(gc.unfreeze)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With --no-skips, fail because of skipped tests. Programs can be installed, another machine cannot."""
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter is None or not session.config.getoption("--no-skips"):  # a worker of xdist has no reporter
        return
    reasons = {report.longrepr[2].removeprefix("Skipped: ") for report in reporter.stats.get("skipped", [])}
    missing = [reason for reason in reasons if not reason.startswith(("needs a GPU", "needs a processor"))]
    if missing and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter.ensure_newline()
        reporter.line(
            f"error: --no-skips allows no skip except on another machine. Install these: {'; '.join(missing)}"
        )


def pytest_collection_finish() -> None:
    """Exclude what the tests' modules hold from the search for garbage: thousands of classes and all of torch."""
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips", action="store_true", help="fail when a test is skipped that could run on this machine"
    )
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
def one_thread() -> Iterator[None]:
    """Use one thread: two threads that spin beside other work on two cores turn milliseconds into seconds."""
    import torch  # not in workers that compute nothing

    from generate.cpu.team import team

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    team().use(1, own=True)
    torch.set_num_threads(before)


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    """Return a client of the app that the test's own module makes."""
    return app.test_client()
