"""The fault table: every case against a real gunicorn, and after each one the server must be as before.

`./test.sh` runs the quick part in front of mock models, `./test.sh --all` all of it in front of a computed model where a
case has no reason against it; under dynamic, and under nobatch and static where the loop matters. Cases whose way goes
through front ends run with two of them, too, and with `--all` every case does.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import cases_body
import cases_engine
import cases_http
import cases_process
import cases_prompt
import cases_queue
import cases_storms
import pytest
from harness import Setting
from shared_servers import Fleet
from table import Case

from tests.support import ROOT

MODULES = (cases_body, cases_prompt, cases_http, cases_queue, cases_engine, cases_process, cases_storms)
TABLE = [case for module in MODULES for case in module.CASES]
DIFFERS = ("A", "C", "D", "E", "I")  # kinds of cases in which front ends matter
FRONT_ENDS = 2


def runs() -> list[object]:
    """Return each case with each policy in which it matters, those of one server together, and last what ends it."""
    chosen = []
    for case in (case for case in TABLE if case.act):
        mocked = replace(case, setting=replace(case.setting, mock=True))
        if case.quick:
            chosen.append(("dynamic", mocked, ()))
        beside = replace(mocked, setting=replace(mocked.setting, front_ends=FRONT_ENDS))
        is_quick = case.quick and case.id.startswith(DIFFERS)
        chosen.append(("dynamic", beside, () if is_quick else pytest.mark.full))
        chosen += [
            (p, case, pytest.mark.full) for p in case.policies if not (case.quick and p == "dynamic" and case == mocked)
        ]
    chosen.sort(key=lambda run: (run[0], repr(run[1].setting), run[1].killed, run[1].ends))
    return [
        pytest.param(
            policy, case, marks=marks,
            id=f"{case.id}-{policy}{kind(case.setting)}-{case.what.replace(' ', '_')}",
        )
        for policy, case, marks in chosen
    ]  # fmt: skip


def kind(setting: Setting) -> str:
    """Return what the name of a test says of its server."""
    return f"-{setting.front_ends}-front-ends" if setting.front_ends else "" if setting.mock else "-computed"


@pytest.mark.process
@pytest.mark.parametrize(("policy", "case"), runs())
def test_the_case_is_answered_and_harms_nobody(fleet: Fleet, policy: str, case: Case) -> None:
    """Let a case happen to a server, and hold the server to what must be true of it afterwards."""
    server = fleet.server(policy, case.setting)
    watch = nullcontext if case.ends else server.watched
    allowed = {} if case.ends else {"killed": case.killed, "tracebacks": case.tracebacks, "growth": case.growth}
    spoilt = True
    try:
        with watch(**allowed):
            case.act(server)
        spoilt = case.ends
    finally:
        if spoilt:
            fleet.forget(server)


def test_a_case_has_an_act_or_names_tests_that_are_there() -> None:
    for case in TABLE:
        assert case.act or case.tests, case.id
        for name in case.tests:
            file, _, test = name.partition("::")
            assert f"def {test}(" in (ROOT / Path(file)).read_text(), name
