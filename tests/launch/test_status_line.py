"""The server's line on a terminal."""

from __future__ import annotations

from launch.status_line import StatusLine
from observe.meters import Meters
from scheduling.pages import PagePool
from tests.support import wait_until
from tests.support.fakes import FakeModel, fake_engine


def test_the_line_has_the_figures_since_the_line_before() -> None:
    engine, meters, now = fake_engine(FakeModel(), pages=PagePool(41, 4, salt="test")), Meters(), [0.0]
    manager = engine.manager
    manager.listeners.append(meters.on_arrival)
    manager.observers.append(meters.observe)
    line = StatusLine(meters, clock=lambda: now[0])
    inference = manager.enqueue(engine.make_inference("hi", 8, [1, 2]))
    wait_until(lambda: inference.sequence.finish_reason is not None and meters.generation_tokens == 8)
    now[0] = 2.0
    assert line.next(engine) == "running 0 of 8 · waiting 0 · 4 tokens/s · batch fill 12% · KV 0%"
    now[0] = 3.0
    assert " 0 tokens/s · batch fill 0%" in line.next(engine)
    manager.stop()
