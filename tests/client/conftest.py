"""Fixtures of the client's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from client import compare
from client.report import figures
from tests.support.mock_server import MockServer, mock_server


@pytest.fixture
def server() -> Iterator[MockServer]:
    with mock_server() as mock:
        yield mock


@pytest.fixture
def quick_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw few resamples, and ask no simulator: tests/simulate/test_predict.py does."""
    monkeypatch.setattr(figures, "MAX_RESAMPLES", 100)
    monkeypatch.setattr(compare, "SIMULATOR", Path("not here"))
