"""How the tests are run by several processes: what one of them leaves out is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support import ROOT

TESTS = """
import os, pytest
@pytest.mark.parametrize("n", range(3))
def test_passes(n, capsys): print("x"); assert capsys.readouterr().out == "x\\n"
"""
FATAL = """
import os
def test_ends_its_process(): os._exit(3)
def test_comes_after_it(): pass
"""


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-pworkers",
        "--workers",
        "2",
        f"--rootdir={folder}",
        *flags,
        folder,
    ]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environ["TMPDIR"] = str(folder)  # where the tests that failed leave their folders
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)


def test_a_process_that_ends_fails_the_tests_that_it_had_taken_and_no_others(tmp_path: Path) -> None:
    for name in "ac":
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    (tmp_path / "test_b.py").write_text(FATAL)
    done = run(tmp_path)
    assert done.returncode == 1
    assert "6 passed" in done.stdout
    assert "2 failed" in done.stdout
    for name in ("test_ends_its_process", "test_comes_after_it"):
        assert f"FAILED test_b.py::{name}" in done.stdout


def test_a_run_that_is_to_end_with_the_first_failure_does(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_fails(): assert 0\n" + TESTS)
    done = run(tmp_path, "-x")
    assert done.returncode == 1
    assert "1 failed" in done.stdout
