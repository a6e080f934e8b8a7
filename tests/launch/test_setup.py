"""tools/setup.sh: it installs once, and says what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support import ROOT

FAKE_PYTHON = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$1 $2" in
"-c "*) exit "${OLD:-0}" ;;
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip") exit "${PIP:-0}" ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of what setup.sh needs, and a Python that only records its calls."""
    folder = tmp_path / "a folder"
    for name in ("tools/setup.sh", "requirements.txt", "requirements-dev.txt", "client/requirements.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    return folder


def set_up(folder: Path, wanted: str = "requirements.txt", **environ: str) -> tuple[int, str, list[str]]:
    """Run setup.sh from another directory; return its status, its messages, and its calls of Python."""
    calls = folder.parent / "calls"
    calls.write_text("")
    result = subprocess.run(
        [folder / "tools" / "setup.sh", wanted], capture_output=True, text=True, timeout=20, cwd=folder.parent,
        env={"PATH": os.environ["PATH"], "PYTHON": str(folder.parent / "python"), "CALLS": str(calls), **environ},
    )  # fmt: skip
    assert result.stdout == ""
    return result.returncode, result.stderr, calls.read_text().splitlines()


def test_setup_installs_once_and_again_only_what_changed(folder: Path) -> None:
    status, messages, calls = set_up(folder)
    assert status == 0
    assert ".venv" in messages
    assert [call[:7] for call in calls[1:]] == ["-m venv", "-m pip "]
    assert set_up(folder) == (0, "", [])
    status, _, calls = set_up(folder, "requirements-dev.txt")
    assert (status, [call[:7] for call in calls[1:]]) == (0, ["-m pip "])
    assert set_up(folder, "requirements-dev.txt") == (0, "", [])
    with (folder / "client" / "requirements.txt").open("a") as file:
        file.write("something\n")
    assert len(set_up(folder)[2]) == 2
    shutil.rmtree(folder / ".venv" / "bin")
    assert len(set_up(folder)[2]) == 3


def test_setup_that_failed_is_tried_again(folder: Path) -> None:
    status, messages, _ = set_up(folder, PIP="1")
    assert status == 1
    assert "error: cannot install requirements.txt" in messages
    assert set_up(folder)[0] == 0


def test_setup_says_when_python_is_too_old(folder: Path) -> None:
    status, messages, calls = set_up(folder, OLD="1")
    assert status == 1
    assert "Python >= 3.10 with venv" in messages
    assert "PYTHON=" in messages
    assert len(calls) == 1
    assert not (folder / ".venv").exists()
    status, messages, _ = set_up(folder, PYTHON="no-such-python")
    assert (status, messages.count("\n")) == (1, 1)
