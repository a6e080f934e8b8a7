"""What tests of the kernels share: one thread, and one folder of compiled libraries."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from generate.cpu.team import team


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread: two threads that spin beside other work on two cores turn milliseconds into seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    team().use(1, own=True)
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def cache(pytestconfig: pytest.Config) -> Path:
    """Return a folder that later runs and other workers share: a library's name has the hash of what it is made of."""
    assert pytestconfig.cache is not None
    return Path(pytestconfig.cache.mkdir("kernels"))


@pytest.fixture
def shared_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep compiled libraries in the shared folder."""
    monkeypatch.setenv("EB_CACHE_DIR", str(cache))
    monkeypatch.delenv("EB_KERNELS", raising=False)
