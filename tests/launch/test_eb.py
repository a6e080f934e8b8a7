"""The one entry point: what ./eb lists, where it works, and what it passes through."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT, points
from tests.support.servers import clean_environment

pytestmark = pytest.mark.skipif(not (ROOT / ".venv/bin/python").exists(), reason="./eb would install .venv first")


def eb(*words: str, script: Path = ROOT / "eb", **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ./eb in another folder than the project's."""
    env = {**clean_environment(), **environ}
    return subprocess.run([script, *words], cwd=os.sep, env=env, capture_output=True, text=True)


def test_alone_it_lists_every_command_that_it_knows() -> None:
    listed = re.findall(r"^  (\w+) ", eb().stdout, re.MULTILINE)
    known = re.findall(r"\w+", " ".join(re.findall(r"^  (\w[\w |]*)\)", (ROOT / "eb").read_text(), re.MULTILINE)))
    assert sorted([*listed, "help"]) == sorted(known)


def test_the_readme_has_its_groups_of_commands() -> None:
    groups = re.findall(r"^(\w.*):\n((?:  .*\n)+)", eb().stdout, re.MULTILINE)
    listed = {title: re.findall(r"^  (\w+)", rows, re.MULTILINE) for title, rows in groups}
    bullets = re.findall(r"^\* \*\*([^*]+)\*\*: (`.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {title.lower(): re.findall(r"`(\w+)`", names) for title, names in bullets} == listed
    assert len(listed) == 4


@pytest.mark.parametrize("words", [["compre"], ["help", "compre"]])
def test_a_mistyped_command_is_answered_with_the_nearest(words: list[str]) -> None:
    done = eb(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown command 'compre'. Did you mean 'compare'? Run ")


@pytest.mark.parametrize("words", points(1, ["load", "--requests", "x"], ["help", "compare"], ["help", "serve"]))
def test_help_and_errors_name_the_command_as_it_was_called(words: list[str]) -> None:
    done = eb(*words)
    said = done.stdout + done.stderr
    assert f"./eb {words[-1] if words[0] == 'help' else words[0]} " in said
    assert not re.search(r"client\.py|client\.compare|\./server\.sh", said)


@pytest.mark.parametrize(
    "words", [["help", "doctor"], ["doctor", "dynamic", "-h"], ["help", "vllm"], ["vllm", "serve", "-h"], ["help"]]
)
def test_help_fits_a_terminal_and_is_no_error(words: list[str]) -> None:
    done = eb(*words)
    assert done.returncode == 0
    assert done.stdout.startswith(("usage: ./eb doctor ", "usage: ./eb vllm ", "usage: ./eb COMMAND "))
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_through_a_link_a_command_gets_its_arguments_and_passes_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "eb").symlink_to(ROOT / "eb")
    done = eb("top", "http://127.0.0.1:1", script=tmp_path / "eb")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("error: cannot reach http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("sim", {"simulate"}),
        ("serve de", {"demo"}),
        ("serve sm", {"smollm2"}),
        ("simulate che", {"check"}),
        ("sweep --over us", {"users"}),
    ],
)
def test_a_shell_completes_commands_and_what_belongs_to_them(words: str, found: set[str]) -> None:
    line = ["eb", *words.split()]
    done = eb(_EB_COMPLETE="bash_complete", COMP_WORDS=" ".join(line), COMP_CWORD=str(len(line) - 1))
    assert {row.partition(",")[2] for row in done.stdout.splitlines()} == found
