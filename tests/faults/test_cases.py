"""The fault table: every case against a real gunicorn, and after each one the server must be as before.

`./test.sh` runs the quick part under dynamic in front of mock models, `./test.sh --all` all of it under nobatch, static
and dynamic, in front of a computed model where a case has no reason against it. Each policy has a file, and so a worker, of
its own: `test_cases_nobatch.py`, `test_cases_static.py`, and this one with dynamic.
"""

from __future__ import annotations

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
from shared_servers import Fleet
from table import Case

from tests.support import ROOT

MODULES = (cases_body, cases_prompt, cases_http, cases_queue, cases_engine, cases_process, cases_storms)
TABLE = [case for module in MODULES for case in module.CASES]


def runs(*wanted: str) -> list[object]:
    """Return each case with each policy it makes sense under, those of one server together, and last what ends it."""
    acts = [case for case in TABLE if case.act]
    mocked = [replace(case, setting=replace(case.setting, mock=True)) for case in acts]
    quick = [("dynamic", mock) for case, mock in zip(acts, mocked) if case.quick]
    full = [(policy, case) for case in acts for policy in case.policies if (policy, case) not in quick]
    chosen = [(*pair, ()) for pair in quick] + [(*pair, pytest.mark.full) for pair in full]
    chosen = [run for run in chosen if run[0] in wanted]
    chosen.sort(key=lambda run: (repr(run[1].setting), run[0], run[1].killed, run[1].ends))
    return [
        pytest.param(
            policy, case, marks=marks,
            id=f"{case.id}-{policy}{'' if case.setting.mock else '-computed'}-{case.what.replace(' ', '_')}",
        )
        for policy, case, marks in chosen
    ]  # fmt: skip


def hold(fleet: Fleet, policy: str, case: Case) -> None:
    """Let a case happen to a server, and hold the server to what must be true of it afterwards."""
    assert case.act is not None
    server = fleet.server(policy, case.setting)
    if case.ends:
        try:
            case.act(server)
        finally:
            fleet.forget(server)
        return
    try:
        with server.watched(killed=case.killed, tracebacks=case.tracebacks, growth=case.growth):
            case.act(server)
    except BaseException:
        fleet.forget(server)
        raise


@pytest.mark.process
@pytest.mark.parametrize(("policy", "case"), runs("dynamic"))
def test_the_case_is_answered_and_harms_nobody(fleet: Fleet, policy: str, case: Case) -> None:
    hold(fleet, policy, case)


def test_a_case_has_an_act_or_names_tests_that_are_there() -> None:
    for case in TABLE:
        assert case.act or case.tests, case.id
        for name in case.tests:
            file, _, test = name.partition("::")
            assert f"def {test}(" in (ROOT / Path(file)).read_text(), name
