"""The first cases of the law checker, which a server tries on a policy of the user's own before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import preflight
from simulate.laws.check import check
from tests.support import SOON

HEAD = "from scheduling import policy\nclass Policy(policy.Policy):\n"
MISTAKES = {
    "admits none": "    def admit(self, waiting, running, budget, now): return 0\n",
    "raises": "    def on_token(self, seq, now): raise KeyError(seq)\n",
    "returns what cannot be used": "    def reserve_tokens(self, seq): return str(seq)\n",
    "reads the clock": "    def on_step(self, plan, now):\n        import time\n        self.at = time.time()\n",
}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the checker's process begin and find a mistake, however slow the machine is."""
    monkeypatch.setattr(preflight, "STARTS_SECONDS", 60.0)
    monkeypatch.setattr(preflight, "CASES_SECONDS", SOON)


def own(tmp_path: Path, body: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text(HEAD + body)
    return str(path)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_as_the_checker_reports_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mistake: str
) -> None:
    name = own(tmp_path, MISTAKES[mistake])
    preflight.check_own_policy(name)
    verdict = check(name, 1, large=0)
    assert verdict.broken is not None
    text = capsys.readouterr().err
    assert text.startswith("warning: ")
    assert f"breaks a law ({verdict.broken.law})" in text


@pytest.mark.usefixtures("patient")
def test_a_hook_that_never_returns_is_named_and_holds_up_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "CASES_SECONDS", 3.0)
    body = "    def order(self, waiting, now):\n        while True: pass\n"
    preflight.check_own_policy(own(tmp_path, body))
    assert "order() of mine.py, line 4" in capsys.readouterr().err


def test_nothing_is_said_of_a_policy_that_keeps_the_laws_and_none_of_the_projects_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    preflight.check_own_policy(own(tmp_path, "    print('loaded')\n    def on_step(self, plan, now): print(now)\n"))
    monkeypatch.setattr("launch.preflight.subprocess.run", None)
    preflight.check_own_policy("dynamic+sjf")
    assert capsys.readouterr().err == ""
