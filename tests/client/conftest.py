"""Fixtures of the client's tests."""

from collections.abc import Iterator

import pytest

from tests.support.mock_server import MockServer, mock_server


@pytest.fixture
def server() -> Iterator[MockServer]:
    with mock_server() as mock:
        yield mock
