"""How a run tells of skipped tests, and what the continuous integration does about them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from points import points
from support import ROOT

TESTS = """
import pytest
def test_of_a_program(): pytest.skip("no browser here: install one (Debian: apt install chromium)")
@pytest.mark.parametrize("n", [1, 2])
def test_of_a_machine(n): pytest.skip("needs a GPU")
def test_of_nothing(): pass
"""


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the tests above with the plugin, as `./test.sh` does."""
    (folder / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-pskips", "-pxdist", f"--rootdir={folder}", *flags, str(folder)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("workers", points(1, "2", "0"))
def test_a_run_ends_with_what_was_skipped_and_how_to_have_it(tmp_path: Path, workers: str) -> None:
    done = run(tmp_path, "-n", workers)
    assert done.returncode == 0
    assert "1 x no browser here: install one (Debian: apt install chromium)" in done.stdout
    assert "2 x needs a GPU" in done.stdout


@pytest.mark.parametrize("workers", points(1, "0", "2"))
def test_a_skip_for_a_missing_program_is_an_error_when_none_is_allowed(tmp_path: Path, workers: str) -> None:
    done = run(tmp_path, "-n", workers, "--no-skips")
    assert done.returncode == 1
    assert "error: --no-skips" in done.stdout


def test_a_test_that_needs_another_machine_may_be_skipped(tmp_path: Path) -> None:
    assert run(tmp_path, "--no-skips", "-k", "machine or nothing").returncode == 0


def test_nothing_tries_a_test_twice() -> None:
    words = (ROOT / "requirements-dev.txt").read_text() + (ROOT / "pyproject.toml").read_text()
    assert "rerun" not in words


def ci(folder: Path, programs: list[str], user: int = 0, apt: str = "exit 0") -> tuple[str, int]:
    """Run .ci/run where only these programs are; return what was called, and its exit status."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    calls = folder / "calls"
    scripts = {
        "test.sh": f'echo "test.sh $*" >> {calls}',
        "bin/apt-get": f'echo "apt-get $*" >> {calls}; echo chatter; {apt}',
        "bin/id": f"echo {user}",
        **{f"bin/{program}": "true" for program in programs},
    }
    (folder / "bin").mkdir()
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "bin" / "bash").symlink_to("/bin/bash")
    (folder / "bin" / "dirname").symlink_to(str(shutil.which("dirname")))
    done = subprocess.run(
        ["/bin/bash", str(folder / ".ci" / "run")], env={"PATH": str(folder / "bin")},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    (folder / "said").write_text(done.stdout + done.stderr)
    return calls.read_text() if calls.exists() else "", done.returncode


ALL = ["chromium", "nginx", "openssl", "gcc"]


def test_ci_installs_what_is_missing_quietly_and_then_allows_no_skip(tmp_path: Path) -> None:
    called, status = ci(tmp_path, ["openssl", "gcc"])
    assert called.splitlines() == ["apt-get update", "apt-get install -y chromium nginx", "test.sh --no-skips"]
    assert status == 0
    assert "chatter" not in (tmp_path / "said").read_text()


@pytest.mark.parametrize(("programs", "user"), [(ALL, 0), ([], 1000)])
def test_ci_installs_nothing_that_is_there_or_that_it_may_not(tmp_path: Path, programs: list[str], user: int) -> None:
    assert ci(tmp_path, programs, user) == ("test.sh --no-skips\n", 0)


def test_ci_says_why_it_could_not_install_and_stops(tmp_path: Path) -> None:
    called, status = ci(tmp_path, [], apt="echo no network; exit 100")
    assert (called, status) == ("apt-get update\n", 1)
    said = (tmp_path / "said").read_text()
    assert "no network" in said
    assert "error: apt-get could not install" in said
