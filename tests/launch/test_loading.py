"""What a start with weights shows while it lasts."""

from __future__ import annotations

from concurrent.futures import Future
from ctypes import CDLL

import pytest

from config import Config
from generate import machine
from launch.load_model import load_model
from terminal.progress import Stages, State


@pytest.mark.parametrize("count", [0, 2])
def test_a_start_names_the_kernels_that_it_compiles_and_counts_weights(
    count: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiling: list[Future[CDLL]] = [Future() for _ in range(count)]
    for kernel in compiling[:1]:
        kernel.set_result(CDLL(None))
    monkeypatch.setattr(machine, "prepare", lambda dtype, quantize: compiling)
    states: dict[str, State] = {}

    def at(self: Stages, *part: object) -> None:
        begin(self, *part)  # type: ignore[arg-type]
        state = self._read()
        states[state.text.partition(":")[0]] = state

    begin = Stages.at
    monkeypatch.setattr(Stages, "at", at)
    load_model(Config(model="bard", device="cpu"), 2)
    assert ("compiling 2 kernels for this processor, once\n" in capsys.readouterr().err) is bool(count)
    assert (states["compiling"][:2] == (1, 2)) if count else "compiling" not in states
    read, layers = states["reading weights"], states["packing weights"]
    assert read.done == read.total
    assert (layers.done, layers.total) == (0, 6)
