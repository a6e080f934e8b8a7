"""How long a process that computes waits for its front ends before it ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from launch import shutdown
from launch.front_ends.workers import EngineWorker


def test_a_machine_that_pauses_while_the_server_drains_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that waits for the front ends is asleep for a second where it wanted a moment."""
    now, ended = [0.0], []
    found = [2, 2, 1, 0, 0, 1]  # open requests, at each look
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + 1.0))
    monkeypatch.setattr(shutdown, "time", clock)
    registry = type("Registry", (), {"open": property(lambda self: dict(enumerate(found)).get(int(now[0]), 0))})()
    stop = cast(Any, lambda: ended.append(now[0]))
    service = SimpleNamespace(registry=registry, batches=None, engine=None, stop=stop)
    shutdown.drain(cast(Any, service), 100.0, EngineWorker.idle_looks)
    assert ended == [len(found) + EngineWorker.idle_looks]
    ended.clear()
    now[0] = 0.0
    shutdown.drain(cast(Any, service), 100.0)  # without front ends
    assert ended == [3.0]
