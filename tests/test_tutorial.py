"""The tutorial: every command runs and prints what its lesson shows; the notebook's cells too, without torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dev.tools.figures import (
    BLOCK,
    DIGESTS,
    FOLDER,
    LESSONS,
    PAGES,
    SAVED,
    Shown,
    commands,
    digests,
    is_same,
    save_files,
)
from simulate.__main__ import main
from tests.support import ROOT

A_FIT = 0.03  # may differ by as much on another machine
PICTURE = re.compile(r"`(results/[\w./-]+\.(?:svg|png))`")


def is_cheap(shown: Shown) -> bool:
    """Whether a block serves so few requests that every run of the tests can afford it."""
    words = [word for command in shown.commands for word in command]
    return "--out" not in words and ("--trace" in words or "burst" in words) and "512" not in words


EVERY = [
    pytest.param(shown, marks=() if is_cheap(shown) else pytest.mark.full, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, shown in enumerate(commands(page))
    if page in LESSONS or shown.lines
]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with all files that the lessons ask for, which is the current one."""
    save_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def test_no_file_of_a_lesson_is_saved_twice() -> None:
    names = [name for page in LESSONS for name, _ in SAVED.findall(page.read_text("utf-8"))]
    assert len(names) == len(set(names))
    used = {word for page in LESSONS for shown in commands(page) for command in shown.commands for word in command}
    assert {word for word in used if word.startswith("mine/")} <= {*names}


@pytest.mark.parametrize("shown", EVERY)
def test_a_command_prints_what_its_lesson_shows(
    shown: Shown, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    breaks_a_law = any("breaks a law" in line for line in shown.lines)
    for command in shown.commands:
        assert main([str(ROOT / word) if word.startswith("docs/") else word for word in command]) == breaks_a_law
    printed = capsys.readouterr()
    lines = iter((printed.err + printed.out).splitlines())
    for line in shown.lines:
        # Three dots stand for what takes another time.
        wanted = re.escape(line).replace(re.escape("..."), ".*") + r"\s*"
        rel = A_FIT if shown.commands[0][0] == "advise" else 0.0
        same = (re.fullmatch(wanted, other) or is_same(line, other, rel) for other in lines)
        assert any(same), line  # each after the one before
    for out in (command[command.index("--out") + 1] for command in shown.commands if "--out" in command):
        named = {name for page in LESSONS for name in PICTURE.findall(page.read_text("utf-8")) if name.startswith(out)}
        assert [name for name in named if not (workplace / name).exists()] == []


@pytest.mark.usefixtures("workplace")
def test_the_figures_of_the_pages_are_those_of_this_simulator() -> None:
    """Of all commands, with fewer requests; where this fails, `python -m dev.tools.figures` writes the pages anew."""
    now, kept = digests(), json.loads(DIGESTS.read_text())
    for new, old in zip(now.pop("advise"), kept.pop("advise"), strict=True):
        assert len(new) == len(old)
        assert [line for line, other in zip(old, new) if not is_same(line, other, A_FIT)] == []
    assert now == kept


@pytest.mark.full
def test_the_first_commands_make_what_the_lessons_need(tmp_path: Path) -> None:
    (tmp_path / "eb").symlink_to(ROOT / "eb")
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    begin = "\n".join(text for kind, text in BLOCK.findall((FOLDER / "README.md").read_text("utf-8")) if kind == "bash")
    done = subprocess.run(["bash", "-c", f"set -e\n{begin}"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine").is_dir()


EXECUTE = """
import contextlib, io, json, sys
cells = [cell for cell in json.load(open(sys.argv[1]))["cells"] if cell["cell_type"] == "code"]
names = {"__name__": "__main__"}
for number, cell in enumerate(cells):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    shown = "".join(line for output in cell["outputs"] for line in output["text"])
    assert printed.getvalue() == shown, f"cell {number} printed:\\n{printed.getvalue()}\\nand not:\\n{shown}"
assert not {"torch", "numpy", "IPython"} & {*sys.modules}
"""


def test_the_notebooks_cells_print_what_it_shows_without_torch_and_numpy(tmp_path: Path) -> None:
    notebook = FOLDER / "lab.ipynb"
    assert json.loads(notebook.read_text("utf-8"))["nbformat"] == 4
    code = [sys.executable, "-c", EXECUTE, str(notebook)]
    done = subprocess.run(code, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
