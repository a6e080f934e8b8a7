"""The limit on a call of a hook: a loop that never ends gets a sentence, whatever the policy catches."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from scheduling.hook_limit import HookTimeout
from simulate import __main__ as command_line
from simulate.hook_limit import limited
from simulate.laws.check import check
from tests.support import ROOT, points

HEAD = "from scheduling import policy\n\n\nclass Policy(policy.Policy):\n"
ORDER = HEAD + "    def order(self, waiting, now):\n"
ENDLESS = {
    "hook": (ORDER + "        while True:\n            now += 1\n", "order() of loop.py, line "),
    "constructor": (HEAD + "    def __init__(self):\n        while True:\n            pass\n", "__init__() of loop.py"),
    "helper": (ORDER + "        return sorted(waiting, key=endless)\n\n\ndef endless(seq):\n    while True:\n        pass\n",
               "order() of loop.py, line 1"),
    "generator": (ORDER + "        for seq in waiting:\n            while True:\n                now += 1\n            yield seq\n",
                  "order() of loop.py"),
    "object": (ORDER + "        return Endless(waiting)\n\n\nclass Endless(list):\n    def __iter__(self):\n        while True:\n"
               "            pass\n", "loop.py, line 1"),
    "error": (ORDER + "        raise Endless\n\n\nclass Endless(Exception):\n    def __str__(self):\n        while True:\n"
              "            pass\n", "loop.py, line 1"),
    "file": ("while True:\n    pass\n", "loop.py, line "),
    "catches": (ORDER + "        while True:\n            try:\n                now += 1\n            except Exception:\n"
                "                pass\n", "order() of loop.py"),
}  # fmt: skip


def written(folder: Path, kind: str) -> str:
    path = folder / "loop.py"
    path.write_text(ENDLESS[kind][0])
    return str(path)


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_endless_loop_is_stopped_with_its_hook_file_and_line(kind: str, tmp_path: Path) -> None:
    with pytest.raises(HookTimeout) as stopped, limited(0.1):
        check(written(tmp_path, kind), 8, large=0)
    assert ENDLESS[kind][1] in str(stopped.value)


COMMANDS = ["check", "check --exhaustive", "run", "plan", "fleet", "adversary", "arena --jobs 1 --only"]


@pytest.mark.parametrize("command", points(len(COMMANDS), *COMMANDS, "arena --jobs 2 --num 30 --only"))
def test_each_command_ends_with_status_1(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "limited", partial(limited, 0.1))
    monkeypatch.chdir(tmp_path)
    assert command_line.main([*command.split(), written(tmp_path, "hook")]) == 1
    assert "error: order() of loop.py, line" in capsys.readouterr().err


def test_a_loop_that_catches_everything_ends_the_process_with_the_sentence(tmp_path: Path) -> None:
    path = tmp_path / "loop.py"
    body = ["while True:", "    try:", "        while True:", "            now += 1", "    except:", "        pass"]
    path.write_text(ORDER + "".join(f"        {line}\n" for line in body))
    code = (
        "import sys\nfrom simulate import hook_limit\nfrom simulate.laws.check import check\nhook_limit.GRACE = 0.1\n"
        "with hook_limit.limited(0.1):\n    check(sys.argv[1], 8)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 1
    assert "error: order() of loop.py, line" in ended.stderr


def test_many_short_calls_are_not_one_long_one() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with limited(0.1):
        assert check("dynamic+sjf", 80, large=0).broken is None
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_timer_that_ran_before_goes_on_with_what_is_left_of_it() -> None:
    signal.setitimer(signal.ITIMER_REAL, 500.0)
    try:
        with limited(0.1):
            pass
        assert 400 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
