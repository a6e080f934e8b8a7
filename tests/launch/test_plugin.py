"""What EB_PLUGIN may name, and that nothing is put around the engine's parts without it."""

from __future__ import annotations

import pytest

from launch import plugin
from tests.support.servers import run_app


def test_without_a_plugin_everything_goes_through_as_it_is() -> None:
    none, part = plugin.read({}), object()
    assert [none.model(part, str), none.maker(part), none.stream(part)] == [part] * 3
    assert (none.armed, none.observers()) == ([], [])


@pytest.mark.parametrize("text", ["no.such.module {}", 'tests.support.faults {"slow_stp": {"ms": 5}}'])
def test_a_plugin_that_cannot_be_read_refuses_the_start(text: str) -> None:
    done = run_app("dynamic", "--model", "gpt2", EB_PLUGIN=text)
    assert done.returncode == 2
    assert text[:12] in done.stderr or "slow_stp" in done.stderr
    assert "Traceback" not in done.stderr
