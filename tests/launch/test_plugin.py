"""What EB_PLUGIN may name, and that nothing is put around the engine's parts without it."""

from __future__ import annotations

import pytest

import app
from launch import plugin


def test_without_a_plugin_everything_goes_through_as_it_is() -> None:
    none, part = plugin.read({}), object()
    assert [none.model(part, str), none.maker(part), none.stream(part)] == [part] * 3
    assert (none.armed, none.observers()) == ([], [])


@pytest.mark.parametrize("text", ["no.such.module {}", 'tests.support.faults {"slow_stp": {"ms": 5}}'])
def test_a_plugin_that_cannot_be_read_refuses_the_start(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EB_PLUGIN", text)
    with pytest.raises(SystemExit) as caught:
        app.main(["dynamic", "--model", "gpt2"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert text[:12] in error or "slow_stp" in error
