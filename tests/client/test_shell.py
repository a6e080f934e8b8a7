"""What commands owe their shell."""

from __future__ import annotations

import subprocess
import sys

import pytest

import config
from tests.support import ROOT, points
from tests.support.servers import clean_environment

POLICIES = {"static": "one", "static-exact": "two", "dynamic": "three"}


@pytest.mark.parametrize("command", points(1, ["app.py", "--print-config"], ["client/client.py", "--help"]))
def test_a_reader_that_leaves_early_ends_a_command_quietly(command: list[str]) -> None:
    with subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()  # long before it prints
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("words", "found"),
    [("sta", {"static", "static-exact"}), ("d", {"dynamic", "demo", "doctor"}), ("static --overload-st", {"--overload-status"}),
     ("static --overload-status 5", {"503"})],
)  # fmt: skip
def test_a_shell_completes_policies_flags_and_values(
    words: str, found: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["./server.sh", *words.split()]
    environ = {"_SERVER_SH_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(line), "COMP_CWORD": str(len(line) - 1)}
    with pytest.MonkeyPatch.context() as patch:  # click reads the words from the process's own environment
        for name, value in environ.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit):
            config.load(environ=environ, policies=POLICIES)
    assert {row.partition(",")[2] for row in capsys.readouterr().out.splitlines()} == found
