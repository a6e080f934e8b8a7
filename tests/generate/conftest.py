"""What tests of the engine share."""

from collections.abc import Iterator

import pytest

from tests.support import points


@pytest.fixture(params=["TILES", "DOT", "FMA"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Multiply in each way that this processor has."""
    from generate.cpu import linear  # not in workers that compute nothing
    from generate.cpu.declarations import declarations

    library, ways = linear._library(), declarations().constants
    if not library.packed_linear_has(ways[request.param]):
        pytest.skip(f"needs a processor that multiplies by {request.param}")
    library.packed_linear_use(ways[request.param])
    yield request.param
    library.packed_linear_use(ways[linear.bfloat16_way().upper()])


@pytest.fixture(params=points(1, "kernels", "plain"))
def kernels_or_plain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute with the C kernels, as the server does, and with the plain layers of PyTorch."""
    if request.param == "plain":
        monkeypatch.setenv("EB_KERNELS", "off")
