"""A pytest plugin: --workers N imports and collects the tests once, and forks N processes that run them by files.

Each worker of pytest-xdist would import and collect all of them itself, which takes as long as hundreds of the tests.
The groups that start servers come first, then those that compute, so that no worker ends with a long one.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

COMPUTES = ("simulate", "generate", "policies", "scheduling")
USES_TRANSFORMERS = ("support_checkpoints", "support_gguf", "from transformers")
STOPPED = 1 << 30


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers", type=int, default=0, help="how many processes run the tests (default: this one alone)"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    starts_servers = {item.path for item in items if item.get_closest_marker("process")}
    items.sort(key=lambda item: (item.path not in starts_servers, item.path.parent.name not in COMPUTES))


def grouped(items: list[pytest.Item], is_quick: bool) -> list[list[pytest.Item]]:
    """Return the tests of each file; those of the page share a browser, quick ones a library that loads for seconds."""
    groups: dict[str, list[pytest.Item]] = {}
    names: dict[Path, str] = {}
    for item in items:
        if item.path not in names:
            names[item.path] = shared_by(item.path, is_quick) or str(item.path)
        groups.setdefault(names[item.path], []).append(item)
    return list(groups.values())


def shared_by(path: Path, is_quick: bool) -> str:
    if path.parent.name == "web":
        return "browser"
    text = path.read_text("utf-8") if is_quick else ""
    return "transformers" if any(name in text for name in USES_TRANSFORMERS) else ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    options = session.config.option
    if not options.workers or options.collectonly or options.usepdb or session.testsfailed:
        return None
    Crew(session, options.workers).run()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


class Crew:
    """The processes that run a session's tests, and what they told of them."""

    def __init__(self, session: pytest.Session, count: int) -> None:
        self.session = session
        self.config = session.config
        self.groups = grouped(session.items, "not full" in str(self.config.getoption("markexpr")))
        self.left = {item.nodeid: item for item in session.items}
        context = multiprocessing.get_context("fork")
        self.next = context.Value("i", 0)  # the group that nobody has taken
        self.folder = Path(tempfile.mkdtemp(prefix="pytest-"))
        self.workers: dict[Connection, Any] = {}
        self.running: dict[Connection, str] = {}
        for number in range(min(count, len(self.groups))):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=self.work, args=(theirs, self.folder / str(number)))
            process.start()
            theirs.close()
            self.workers[mine] = process

    def run(self) -> None:
        """Pass on what the workers tell until they have ended."""
        open_pipes = list(self.workers)
        try:
            while open_pipes:
                for pipe in wait(open_pipes):
                    assert isinstance(pipe, Connection)
                    try:
                        self.hear(pipe, *pipe.recv())
                    except EOFError:
                        open_pipes.remove(pipe)
                        self.ended(pipe)
                if self.session.shouldfail or self.session.shouldstop:
                    self.next.value = STOPPED
            for item in self.left.values() if self.next.value < STOPPED else ():
                self.fail(item, "the process that had taken this test ended before it")
        finally:
            self.next.value = STOPPED
            for process in self.workers.values():
                process.join()
        if not self.session.testsfailed:
            shutil.rmtree(self.folder, ignore_errors=True)

    def hear(self, pipe: Connection, kind: str, told: Any) -> None:
        hook = self.config.hook
        if kind == "began":
            self.running[pipe] = told
        elif kind == "report":
            hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=self.config, data=told))
        else:
            item = self.left.pop(self.running.pop(pipe))
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def ended(self, pipe: Connection) -> None:
        process = self.workers[pipe]
        process.join()
        if pipe in self.running:
            item = self.left.pop(self.running[pipe])
            self.fail(item, f"the process that ran this test ended with status {process.exitcode}")

    def fail(self, item: pytest.Item, why: str) -> None:
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
        self.config.hook.pytest_runtest_logreport(report=report)

    def work(self, pipe: Connection, folder: Path) -> None:
        """Run groups of tests in a process of its own until none is left."""
        plugins = self.config.pluginmanager
        capture = plugins.getplugin("capturemanager")
        if capture is not None:  # a file of its own for what tests print
            capture.stop_global_capturing()
            capture.start_global_capturing()
            capture.suspend_global_capture(in_=True)
        plugins.unregister(name="terminalreporter")
        plugins.register(Teller(self.config, pipe))
        folder.mkdir()
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)
        try:
            tests = self.taken()
            item = next(tests, None)
            while item is not None:
                following = next(tests, None)
                self.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                item = following
        except KeyboardInterrupt:
            plugins.getplugin("runner").pytest_sessionfinish(self.session)  # ends the servers of fixtures

    def taken(self) -> Iterator[pytest.Item]:
        """Yield the tests of the groups that this process takes."""
        while True:
            with self.next.get_lock():
                number = self.next.value
                self.next.value += 1
            if number >= len(self.groups):
                return
            for item in self.groups[number]:
                if self.next.value >= STOPPED:
                    return
                yield item


class Teller:
    """Tells the process that collected the tests how they went."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self.config = config
        self.pipe = pipe

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.pipe.send(("began", nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.pipe.send(("report", data))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.pipe.send(("finished", nodeid))
