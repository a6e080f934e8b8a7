"""A process that can get no more memory: nothing is computed, every request ends, and the engine lives on."""

from __future__ import annotations

import pytest

from serving import headroom
from tests.support.serving import Serve, every_policy, is_answered, kind_of

TOO_MUCH = 1 << 60  # bytes, more than any system grants


@every_policy
def test_requests_that_run_when_memory_ends_get_its_error_and_later_ones_their_tokens(
    serve: Serve, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(policy, slots=4)
    served.hold("first", 6)
    requests = [served.ask(f"r{i}", 6) for i in range(6)]
    with monkeypatch.context() as patch:
        patch.setattr(headroom, "HEADROOM", TOO_MUCH)
        patch.setattr(headroom, "LASTING", 0.0)
        served.model.gate.set()
        assert {kind_of(one) for one in requests} == {"out_of_memory"}
    assert is_answered(served.ask("last", 6))
    assert served.manager.inbox.failure is None
    assert served.is_empty()


def test_memory_that_the_system_grants_is_no_error() -> None:
    headroom.check_headroom()
