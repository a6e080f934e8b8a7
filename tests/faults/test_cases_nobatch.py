"""The fault table under nobatch, in a worker of its own: its servers are not those of the other policies."""

from __future__ import annotations

import pytest
from shared_servers import Fleet
from table import Case
from test_cases import hold, runs


@pytest.mark.process
@pytest.mark.parametrize(("policy", "case"), runs("nobatch"))
def test_the_case_under_nobatch_is_answered_and_harms_nobody(fleet: Fleet, policy: str, case: Case) -> None:
    hold(fleet, policy, case)
