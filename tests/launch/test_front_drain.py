"""How long a process that computes waits for its front ends before it ends."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from launch.front_ends import workers


def test_a_machine_that_pauses_while_the_server_drains_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that waits for the front ends is asleep for a second where it wanted a moment."""
    now, found, ended = [0.0], iter([2, 2, 1, 0, 0, 1]), []
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + 1.0))
    monkeypatch.setattr(workers, "time", clock)
    monkeypatch.setattr(workers.Worker, "_drain", lambda worker, service, sig, seconds: ended.append((now[0], seconds)))
    worker = object.__new__(workers.EngineWorker)
    worker.front_ends = type("Links", (), {"links": [1], "open": property(lambda links: next(found, 0))})()
    worker._drain(None, signal.SIGTERM, 100.0)
    assert ended == [(6 + workers.IDLE_LOOKS, 94.0 - workers.IDLE_LOOKS)]
