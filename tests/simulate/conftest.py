"""What the simulator's tests share."""

import pytest


@pytest.fixture(autouse=True)
def regret_in_one_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the replays that split the regret, which each run has four of. test_bounds.py has them."""
    monkeypatch.setattr("simulate.best.regret.MOST_REQUESTS", 0)
