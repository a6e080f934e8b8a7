"""Who delayed a request is told only where the simulation waits about as long as the request really did."""

from __future__ import annotations

from typing import Any

import pytest

from costs.cost import Scaled
from observe.replay import recording as recordings
from observe.replay.question import Server
from observe.replay.recording import Recording
from observe.replay.what_if import WhatIf
from simulate.measured import what_if as simulated
from simulate.simulator import Run
from tests.support.observe import COST, answer_to, inferences, manager, recorded

SLOWER = 1.22


def slow(count: int = 120, rate: float = 5.0) -> tuple[Recording, Run]:
    """Return a recording of a server whose steps take 22 % longer than COST; at 5 requests a second it has a standing queue."""
    return recorded("dynamic", Scaled(COST, SLOWER), people=inferences(count, rate))[:2]


def blame(recording: Recording, id: str) -> dict[str, Any]:
    one = WhatIf(Server(manager("dynamic"), recording), 1024)
    return answer_to(one._server.question(one._beside(id), blame=id), simulated.answer_from)


def test_a_queue_that_is_no_longer_recorded_is_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MAX_REQUESTS", 10)
    recording, _ = slow()
    kept = recording.arrived()
    assert not any(one.alone for one in kept)
    last = max(kept, key=lambda one: one.waited)
    answer = blame(recording, last.id)
    assert answer["wait_ms"]["measured"] == pytest.approx(1000 * last.waited, abs=0.001)
    assert answer["wait_ms"]["simulated"] < 0.8 * answer["wait_ms"]["measured"]
    assert not answer["trusted"]


@pytest.mark.parametrize(("rate", "least", "most"), [(5.0, 500, 600), (0.5, 1, 50)])
def test_the_history_of_a_request_begins_where_the_server_was_last_idle(rate: float, least: int, most: int) -> None:
    recording, run = slow(600, rate)
    asked = run.sequences[-1]
    history = WhatIf(Server(manager("dynamic"), recording), 1024)._beside(asked.id)
    assert history[0].alone
    assert not any(one.alone for one in history[1:])
    assert history[-1].id == asked.id
    assert least <= len(history) <= most
