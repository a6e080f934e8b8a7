"""Small scopes, gone through as a whole: what is shipped keeps the laws, and faults that chance misses are found."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_check import EVERY

from simulate.check import check, check_exhaustively
from simulate.commands.check import main
from simulate.exhaustive import Scope

RARE = Path(__file__).parents[1] / "mutants" / "rare"
LAWS = {
    "forgets_after_two": {"no idle slot while a request fits", "no request starves"},
    "blocks_at_the_last_token": {"no idle slot while a request fits"},
}


@pytest.mark.parametrize("name", LAWS)
def test_a_rare_fault_that_random_cases_miss_is_found(name: str) -> None:
    policy = str(RARE / f"{name}.py")
    assert check(policy, 60, large=0).broken is None
    verdict = check_exhaustively(policy, Scope(3, 2))
    assert verdict.broken is not None
    assert verdict.broken.law in LAWS[name]
    assert verdict.case is not None
    assert len(verdict.case.requests) <= 3


def test_every_rare_fault_is_on_the_list() -> None:
    assert {path.stem for path in RARE.glob("*.py")} == set(LAWS)


@pytest.mark.parametrize("name", ["dynamic", "static", "window", "dynamic+sjf", "dynamic+vtc"])
def test_a_policy_keeps_the_laws_in_a_small_scope(name: str) -> None:
    verdict = check_exhaustively(name, Scope(3, 2))
    assert verdict.broken is None, str(verdict)
    assert verdict.cases > verdict.states > 50


@pytest.mark.full
@pytest.mark.parametrize("name", EVERY)
def test_every_policy_that_is_shipped_keeps_the_laws_for_four_requests(name: str) -> None:
    verdict = check_exhaustively(name, Scope(4, 2))
    assert verdict.broken is None, str(verdict)


@pytest.mark.full
@pytest.mark.parametrize("name", ["dynamic", "static"])
def test_a_policy_keeps_the_laws_in_the_whole_scope(name: str) -> None:
    verdict = check_exhaustively(name)
    assert verdict.broken is None, str(verdict)


def test_the_command_goes_through_a_scope(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dynamic", "--exhaustive", "--requests", "2", "--longest", "2"]) == 0
    assert "all arrivals of up to 2 requests" in capsys.readouterr().out
    assert main([str(RARE / "blocks_at_the_last_token.py"), "--exhaustive", "--requests", "2"]) == 1
    assert main(["dynamic", "--requests", "2"]) == 2
    assert main(["dynamic", "--exhaustive", "--cases", "2"]) == 2
