"""How the files of tests are handed to workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support import ROOT

FIRST = """
import sys
from pathlib import Path
import pytest
SAID = Path(__file__).with_name("said")
def say(words): SAID.write_text((SAID.read_text() if SAID.exists() else "") + words + " ")
@pytest.fixture(scope="module", autouse=True)
def shared():
    yield
    say("fixture-ends")
@pytest.mark.parametrize("n", [1, 2])
def test_of_two(n):
    assert "test_second" not in sys.modules
    say(f"first-{n}")
@pytest.mark.slow
def test_that_is_deselected(): say("slow")
"""
SECOND = """
from test_first import say
def test_it(): say("second")
"""
SLOW = """
import pytest
@pytest.mark.slow
def test_that_is_deselected(): pass
"""
INI = """
[pytest]
markers = slow: slow
addopts = -m 'not slow'
"""


FILES = {
    "sub/test_alone.py": "def test_it(): pass", "sub/test_slow.py": SLOW,
    "test_broken.py": "import nothing_of_this_name", "test_first.py": FIRST, "test_second.py": SECOND, "pytest.ini": INI
}  # fmt: skip


def run(folder: Path, *flags: str) -> tuple[list[str], int]:
    """Run these files in one worker; return what their tests said, and the exit status."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-pby_file", "-pxdist", "-n1", "--dist=loadfile", *flags]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
    return (folder / "said").read_text().split(), done.returncode


def test_a_file_is_imported_when_its_turn_comes_and_fails_the_run_where_it_cannot_be(tmp_path: Path) -> None:
    assert run(tmp_path) == (["first-1", "first-2", "fixture-ends", "second"], 1)


def test_a_test_that_is_named_is_found(tmp_path: Path) -> None:
    assert run(tmp_path, "test_second.py::test_it") == (["second"], 0)
