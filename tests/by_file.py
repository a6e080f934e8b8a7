"""A pytest plugin: how `--dist loadfile` hands the files to its workers.

A worker imports only the files whose tests it runs, when their turn comes. It would import all of them at its start,
which took a tenth of the processor time of a quick run.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
STARTS_SERVERS = ("mark.process", "in_a_browser")
COMPUTES = ("simulate", "generate", "policies", "scheduling")
# The files that take minutes in --all: none is left to one worker at the end.
LONGEST = ["ray", "bounds", "cases", "check", "cases_nobatch", "smollm2", "cases_static", "exhaustive", "bodies", "tutorial",
           "clients", "published"]  # fmt: skip
SLOW_TO_IMPORT = {
    "transformers": ("support_checkpoints", "support_gguf", "from transformers"),
    "openai": ("official_client",),
}


class WholeFile(pytest.Item):
    """All tests of a file: what a worker is told to run."""

    def runtest(self) -> None:
        raise NotImplementedError("the tests of a file are run in its place")


class Unread(pytest.File):
    """A file that is not imported yet."""

    def collect(self) -> list[WholeFile]:
        return [WholeFile.from_parent(self, name="tests")]


@cache
def text_of(path: Path) -> str:
    return path.read_text("utf-8")


@cache
def unit_of(file: str) -> str:
    """Return what one worker of a quick run takes as a whole: a file, or all files that begin with the same slow import."""
    if file.startswith("tests/web/"):
        return "browser"
    text = text_of(TESTS.parent / file)
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


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let a worker read late, unless single tests are chosen, which can only be found among all that were read."""
    option = node.config.option
    chosen = option.keyword or option.lf or option.failedfirst or any("::" in arg for arg in node.config.args)
    node.workerinput["reads_late"] = option.dist == "loadfile" and not chosen


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Unread | None:
    reads_late = getattr(parent.config, "workerinput", {}).get("reads_late")
    return Unread.from_parent(parent, path=module_path) if reads_late else None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Put the longest files first, then those that start servers, then those that compute: no worker ends with one."""

    def turn(item: pytest.Item) -> tuple[int, bool, bool]:
        starts_servers = any(words in text_of(item.path) for words in STARTS_SERVERS)
        name = item.path.stem.removeprefix("test_")
        place = LONGEST.index(name) if name in LONGEST else len(LONGEST)
        return place, not starts_servers, item.path.parent.name not in COMPUTES

    items.sort(key=turn)
    files = [item for item in items if isinstance(item, WholeFile)]
    yield
    items[:] = files or items  # which tests of a file are deselected is known when it has been read


def read(file: WholeFile) -> list[pytest.Item]:
    """Import a file and return the tests that are selected. The search for garbage never sees what was imported."""
    assert file.parent is not None
    gc.collect()
    gc.disable()
    module = pytest.Module.from_parent(file.parent.parent, path=file.path)
    tests = list(file.session.genitems(module))
    file.config.hook.pytest_collection_modifyitems(session=file.session, config=file.config, items=tests)
    gc.freeze()
    gc.enable()
    return tests


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run the tests of a file in its place."""
    if not isinstance(item, WholeFile):
        return None
    session = item.session
    place = session.items.index(item)
    tests = read(item)
    if not tests:  # the test before left to this file what its fixtures share with it
        session._setupstate.teardown_exact(nextitem)
    for test, following in zip(tests, [*tests[1:], nextitem]):
        session.items[place] = test  # xdist makes sure that a report is about the item that it asked for
        item.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
        if session.shouldstop or session.shouldfail:
            break
    return True
