"""Who delayed a request is told only where the simulation waits about as long as the request really did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from costs.cost import Scaled
from observe.replay import recording as recordings
from observe.replay.question import Server
from observe.replay.recording import Recording
from observe.replay.what_if import WhatIf
from scheduling.sequence import Sequence
from simulate.measured import what_if as simulated
from simulate.measured.least_squares import TERMS
from simulate.simulator import Run
from tests.support.observe import COST, answer_to, inferences, manager, served, watch

SLOWER = 1.22


def slow(count: int = 120, rate: float = 5.0) -> tuple[Recording, Run]:
    """Return a recording of a server whose steps take 22 % longer than COST; at 5 requests a second it has a standing queue."""
    people = inferences(count, rate)
    run = served("dynamic", people, Scaled(COST, SLOWER))
    recording = Recording(clock=lambda: run.ended)
    watch(recording, run, people)
    return recording, run


def blame(recording: Recording, id: str, cost: str) -> dict[str, Any]:
    one = WhatIf(Server(manager("dynamic"), recording, cost=cost), 1024)
    return answer_to(one._question(one._beside(id), blame=id), simulated.answer_from)


@pytest.fixture
def law(tmp_path: Path) -> str:
    """Return a cost file with COST."""
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"cost": {"kind": "affine", **COST.__dict__}}))
    return str(path)


def longest_waiting(run: Run) -> Sequence:
    return max(run.sequences, key=lambda seq: (seq.scheduled_at or 0.0) - seq.arrived_at)


def test_steps_slower_than_their_law_are_slowed_once_so_that_the_queue_lasts(law: str) -> None:
    recording, run = slow()
    asked = longest_waiting(run)
    assert asked.scheduled_at is not None
    answer = blame(recording, asked.id, law)
    waited = 1000 * (asked.scheduled_at - asked.arrived_at)
    assert waited > 500
    assert answer["wait_ms"]["measured"] == pytest.approx(waited, abs=0.001)
    assert answer["wait_ms"]["simulated"] == pytest.approx(waited, rel=0.02)
    assert answer["run_ms"]["simulated"] == pytest.approx(answer["run_ms"]["measured"], rel=0.02)
    assert answer["trusted"]
    assert answer["cost"] == {"from": "cost.json", "scaled_by": pytest.approx(SLOWER, rel=0.001)}


def test_a_simulation_that_is_close_is_not_scaled(tmp_path: Path) -> None:
    path = tmp_path / "slow.json"
    path.write_text(json.dumps({"cost": {"kind": "affine", **{name: SLOWER * getattr(COST, name) for name in TERMS}}}))
    recording, run = slow()
    answer = blame(recording, longest_waiting(run).id, str(path))
    assert answer["trusted"]
    assert answer["cost"] == {"from": "slow.json"}


def test_a_queue_that_is_no_longer_recorded_is_not_explained(monkeypatch: pytest.MonkeyPatch, law: str) -> None:
    monkeypatch.setattr(recordings, "MAX_REQUESTS", 10)
    recording, _ = slow()
    kept = recording.arrived()
    assert not any(one.alone for one in kept)
    last = max(kept, key=lambda one: one.waited)
    answer = blame(recording, last.id, law)
    assert answer["wait_ms"]["measured"] == pytest.approx(1000 * last.waited, abs=0.001)
    assert answer["wait_ms"]["simulated"] < 0.8 * answer["wait_ms"]["measured"]
    assert not answer["trusted"]


@pytest.mark.parametrize(("rate", "least", "most"), [(5.0, 500, 600), (0.5, 1, 50)])
def test_the_history_of_a_request_begins_where_the_server_was_last_idle(
    law: str, rate: float, least: int, most: int
) -> None:
    recording, run = slow(600, rate)
    asked = run.sequences[-1]
    history = WhatIf(Server(manager("dynamic"), recording, cost=law), 1024)._beside(asked.id)
    assert history[0].alone
    assert not any(one.alone for one in history[1:])
    assert history[-1].id == asked.id
    assert least <= len(history) <= most
