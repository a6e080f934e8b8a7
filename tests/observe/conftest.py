"""What the tests of simulations beside a server share."""

import pytest


@pytest.fixture(autouse=True)
def as_nice_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the priority of this process, where a test calls what would lower that of a process of its own."""
    monkeypatch.setattr("simulate.measured.observed.os.nice", lambda by: 0)
