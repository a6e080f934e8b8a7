"""What tests of the kernels share: one thread."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread: two threads that spin beside other work on two cores turn milliseconds into seconds."""
    import torch  # not in workers that run nothing of this folder

    from generate.cpu.team import team

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    team().use(1, own=True)
    torch.set_num_threads(before)
