"""The fleet of servers that the cases share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from shared_servers import Fleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("faults"))
    yield fleet
    fleet.close()
