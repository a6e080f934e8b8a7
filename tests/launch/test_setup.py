"""dev/tools/setup.sh: it installs once, takes the smallest build that serves, and says what is missing."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT

FAKE_PYTHON = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in
"-c "*) exit "${OLD:-0}" ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip config list") echo "$PIP_CONFIG" ;;
*--index-url*) exit "${CPU_BUILDS:-0}" ;;
"-m pip "*) exit "${PIP:-0}" ;;
esac
"""
PROGRAMS = ("bash", "cat", "cksum", "cp", "dirname", "env", "grep", "mkdir", "sed", "sh")
NO_CUDA = {"PIP_CONFIG": ""}  # no index is configured


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of what setup.sh needs, beside a Python that only records its calls and a system without drivers."""
    folder = tmp_path / "a folder"
    scripts = (ROOT / "dev/tools/setup.sh", ROOT / "eb", ROOT / "server.sh")
    for path in (*scripts, ROOT / "pyproject.toml", ROOT / "client" / "requirements.txt"):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    (tmp_path / "bin").mkdir()
    for name in PROGRAMS:
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    write_program(tmp_path / "bin" / "uname", '[ "$1" = -s ] && echo "${SYSTEM%% *}" || echo "$SYSTEM"')
    return folder


def set_up(folder: Path, *arguments: str, **environ: str) -> tuple[int, str, list[str]]:
    """Run setup.sh from another directory; return its status, its messages, and its calls of Python."""
    return ran(folder, "dev/tools/setup.sh", *(arguments or ["server"]), **environ)


def ran(folder: Path, script: str, *arguments: str, **environ: str) -> tuple[int, str, list[str]]:
    """Run a script from another directory; return its status, its messages, and its calls of Python."""
    calls = folder.parent / "calls"
    calls.write_text("")
    names = {"PATH": str(folder.parent / "bin"), "PYTHON": str(folder.parent / "python"), "CALLS": str(calls)}
    result = subprocess.run(
        [folder / script, *arguments],
        capture_output=True, text=True, timeout=300, cwd=folder.parent,
        env={"SYSTEM": "Linux x86_64", "PIP_CONFIG": "global.index-url='https://mirror.invalid'", **names, **environ},
    )  # fmt: skip
    assert result.stdout == "" or script == "eb"
    return result.returncode, result.stderr, calls.read_text().splitlines()


def installed(calls: list[str]) -> list[str]:
    """Return what each call of pip installs: the needs of a part, a package, or PyTorch from the index of its CPU builds."""
    return [
        "CPU build" if "--index-url" in call else Path(call.split()[-1]).stem for call in calls if " install " in call
    ]


def test_setup_installs_once_and_again_only_what_changed(folder: Path) -> None:
    status, messages, calls = set_up(folder)
    assert status == 0
    assert ".venv" in messages
    assert any(call.startswith("-m venv") for call in calls)
    assert installed(calls) == ["server"]
    assert set_up(folder) == (0, "", [])
    status, _, calls = set_up(folder, "dev")
    assert (status, installed(calls)) == (0, ["dev", "text-generation==0.7"])
    assert set_up(folder, "dev") == (0, "", [])
    with (folder / "client" / "requirements.txt").open("a") as file:
        file.write("something\n")
    assert installed(set_up(folder)[2]) == ["server"]
    shutil.rmtree(folder / ".venv" / "bin")
    assert installed(set_up(folder)[2]) == ["server"]


def test_setup_that_failed_is_tried_again(folder: Path) -> None:
    status, messages, _ = set_up(folder, PIP="1")
    assert status == 1
    assert "error: cannot install what 'server' needs" in messages
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


@pytest.mark.parametrize(
    "line", ["dynamic --model mock:llm-mock@20", "--model=mock:llm-mock", "demo", "static --demo", "--lab", "--help",
             "dynamic -h", "--version", "--model bard --print-config"],
)  # fmt: skip
def test_a_server_without_weights_and_its_help_need_no_torch_and_another_installs_the_rest(
    folder: Path, line: str
) -> None:
    arguments = line.split()
    assert installed(set_up(folder, "server", *arguments)[2]) == ["mock"]
    assert set_up(folder, "server", *arguments) == (0, "", [])
    assert installed(set_up(folder, "server", "dynamic")[2]) == ["server"]
    assert set_up(folder, "server", *arguments) == (0, "", [])


@pytest.mark.parametrize("command", ["serve", "chat", "fleet", "load", "compare", "sweep", "top", "simulate", "doctor"])
def test_help_installs_no_more_than_a_mock_needs(folder: Path, command: str) -> None:
    calls = ran(folder, "eb", "help", command)[2] + ran(folder, "eb", command, "-h")[2]
    assert set(installed(calls)) <= {"mock", "client"}
    assert command != "fleet" or installed(ran(folder, "eb", "fleet", "dynamic")[2])[-1] == "ray"


@pytest.mark.parametrize(
    ("arguments", "variable", "line", "expected"),
    [
        (("dynamic",), "mock:llm-mock", "", "mock"),
        (("dynamic", "--model", "mock:llm-mock", "--model", "bard"), "mock:llm-mock", "", "server"),
        (("dynamic",), "", "EB_MODEL='mock:llm-mock'", "mock"),
        (("demo",), "", "EB_MODEL=bard", "server"),
        (("demo", "--model", "bard"), "", "", "server"),
        (("dynamic", "--demo", "off"), "", "", "server"),
        (("--lab", "--model", "bard"), "", "", "server"),
        (("smollm2",), "mock:llm-mock", "", "server"),
        (("demo", "smollm2"), "", "", "server"),
        (("mock:llm-mock",), "bard", "", "mock"),
    ],
)
def test_a_flag_names_the_model_before_the_variable_before_the_file(
    folder: Path, arguments: tuple[str, ...], variable: str, line: str, expected: str
) -> None:
    (folder / ".env").write_text(f"EB_PORT=1\n{line}\n")
    assert installed(set_up(folder, "server", *arguments, EB_MODEL=variable)[2]) == [expected]


def test_a_client_alone_installs_little_and_nothing_beside_a_server(folder: Path) -> None:
    file = "client"
    assert installed(set_up(folder, file, **NO_CUDA)[2]) == [file]
    assert set_up(folder, file) == (0, "", [])
    assert installed(set_up(folder, "server")[2]) == ["server"]
    shutil.rmtree(folder / ".venv")
    set_up(folder, "server")
    assert set_up(folder, file) == (0, "", [])


def test_requirements_txt_is_what_a_server_needs_and_the_clients_packages_are_part_of_it(folder: Path) -> None:
    set_up(folder)
    needed = (folder / ".venv/server.txt").read_text().split()
    assert sorted((ROOT / "requirements.txt").read_text().split()) == sorted(needed)
    assert "torch==2.13.0" in needed
    names = [re.split("[<>=]", line)[0] for line in (ROOT / "client/requirements.txt").read_text().split()]
    assert set(names) <= {re.split("[<>=]", line)[0] for line in needed}


has_driver = pytest.mark.skipif(
    Path("/proc/driver/nvidia").exists(), reason="needs a processor without a GPU beside it"
)


@has_driver
def test_a_linux_without_a_driver_gets_the_cpu_build_of_torch_and_the_rest_from_the_ordinary_index(
    folder: Path,
) -> None:
    _, _, calls = set_up(folder, **NO_CUDA)
    assert installed(calls) == ["CPU build", "server"]
    (of_torch,) = (call.split() for call in calls if "--index-url" in call)
    assert {"--no-deps", "--timeout", "torch==2.13.0"} <= set(of_torch)
    assert not any("index" in call for call in calls if "server" in call)


@has_driver
def test_where_the_cpu_builds_cannot_be_reached_the_ordinary_index_takes_their_place(folder: Path) -> None:
    status, messages, calls = set_up(folder, CPU_BUILDS="1", **NO_CUDA)
    assert (status, installed(calls)) == (0, ["CPU build", "server"])
    assert "warning: cannot get the CPU build" in messages


@pytest.mark.parametrize(
    "environ",
    [
        {"PIP_CONFIG": "global.index-url='https://mirror.invalid/simple'"},
        {"PIP_CONFIG": ":env:.extra-index-url='https://mirror.invalid/simple'"},
        {"PIP_CONFIG": "install.find-links='/wheels'"},
        {"PIP_CONFIG": "global.timeout='5'\nglobal.no-index='true'"},
        {"SYSTEM": "Darwin arm64", **NO_CUDA},
        {"DRIVER": "nvidia-smi", **NO_CUDA},
    ],
)
def test_a_mac_a_driver_and_an_index_of_the_users_own_get_the_ordinary_build(
    folder: Path, environ: dict[str, str]
) -> None:
    if "DRIVER" in environ:
        write_program(folder.parent / "bin" / environ["DRIVER"], "true")
    assert installed(set_up(folder, **environ)[2]) == ["server"]


def test_a_mac_with_an_intel_processor_serves_only_mocks(folder: Path) -> None:
    status, messages, calls = set_up(folder, SYSTEM="Darwin x86_64")
    assert (status, calls) == (1, [])
    assert (messages.count("\n"), "--model mock:" in messages) == (1, True)
    assert set_up(folder, "server", "demo", SYSTEM="Darwin x86_64")[0] == 0
