"""What a server records of its requests and steps, and the law that is fitted to these."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import policies
from costs.cost import Affine
from costs.steps import decoding, step_of, step_of_members
from observe.replay.recording import MAX_AGE, MAX_REQUESTS, MAX_STRETCHES, STEPS_PER_SIZE, Recording
from scheduling.iteration import Plan
from scheduling.scheduler import Scheduler
from simulate.hook_limit import limited
from simulate.measured import observed, observed_law
from tests.support.observe import COST, inferences, recorded, served
from tests.support.scheduling import drive, make_scheduler, requests


@pytest.mark.parametrize("policy", ["dynamic", "static", "chunked", "elastic"])
def test_the_cost_of_a_record_is_the_cost_of_its_plan(policy: str) -> None:
    trace = [(i * 7, 3 + i * 5 % 40, 1 + i * 11 % 23) for i in range(40)]
    steps = []

    def planned(scheduler: Scheduler, plan: Plan) -> None:
        steps.append(step_of(plan))

    made = make_scheduler(policy, 6, budget=32)
    run = drive(made, requests(*trace), planned=planned)
    found = [step_of_members(record.members, made.policy.padded) for record in run.iterations]
    assert found == steps


def test_constrained_requests_take_their_masks_with_them_into_the_simulation() -> None:
    people = inferences()
    for one in people[::3]:
        one.sequence.constrained = True
    planned: list[int] = []

    class Noting(Affine):
        def __call__(self, plan: Plan) -> float:
            planned.append(step_of(plan).masks)
            return super().__call__(plan)

    recording, run, _ = recorded("dynamic", Noting(**{**COST.__dict__, "mask_row_s": 0.004}), people=people)
    prompts = {one.id: len(one.sequence.prompt_ids) for one in people[::3]}
    assert [step_of_members(record.members, False, prompts).masks for record in run.iterations] == planned
    assert [one.constrained for one in recording.arrived()] == [s.constrained for s in run.sequences]


def test_only_requests_before_the_oldest_open_one_are_simulated() -> None:
    people = inferences(60)
    run = served("dynamic", people)
    recording = Recording(clock=lambda: run.ended)
    last = next(one for one in people if one.sequence is run.sequences[40])
    others = [one for one in people if one is not last]
    for one in people:
        recording.on_arrival(one)
    for one in others:
        recording.observe(None, [one])
    requests = recording.arrived()
    assert [one.at for one in requests] == [s.arrived_at for s in run.sequences[:40]]
    assert requests[0].alone


def test_the_memory_of_a_recording_is_bounded() -> None:
    recording = Recording(clock=lambda: 500 + MAX_AGE)
    run = served("dynamic", inferences(1))
    for k in range(3 * MAX_REQUESTS):
        (one,) = inferences(1)
        one.sequence.arrived_at, one.sequence.finished_at = k * 0.2, k * 0.2 + 0.1
        one.sequence.output_ids, one.sequence.finish_reason = [1], "length"
        recording.on_arrival(one)
        recording.observe(run.iterations[0], [one])
    requests = recording.arrived()
    assert len(recording._done) == MAX_REQUESTS
    assert 400 < len(requests) < MAX_REQUESTS
    assert requests[0].at > 500
    assert not recording._open
    assert all(len(kept) <= STEPS_PER_SIZE for kept in recording._steps.values())
    assert len(recording.stretches(-1, 1e9)) == MAX_STRETCHES


def test_another_policy_begins_a_new_window() -> None:
    recording, run, _ = recorded()
    (late,) = inferences(1)
    record = run.iterations[-1]
    record.policy, record.t = "static", run.ended
    recording.observe(record, [])
    recording.on_arrival(late)
    late.sequence.output_ids, late.sequence.finish_reason = [1], "length"
    late.sequence.finished_at = run.ended + 2
    recording.observe(None, [late])
    assert recording.arrived() == []  # it came while the other policy decided


def test_an_unreadable_record_is_logged_once_and_ends_the_recording(caplog: pytest.LogCaptureFixture) -> None:
    recording, (before, after) = Recording(), inferences(2)
    recording.on_arrival(before)
    assert recording.oldest_open() == before.sequence.arrived_at
    for _ in range(3):
        recording.observe(SimpleNamespace(), [])  # type: ignore[arg-type]
    assert len(caplog.records) == 1
    recording.on_arrival(after)
    assert recording.oldest_open() == float("inf")


def test_an_embedding_is_simulated_as_an_answer_of_one_token() -> None:
    def seen(tokens: int) -> list[tuple[Any, ...]]:
        people = inferences()
        for one in people[::2]:
            one.sequence.max_tokens = tokens
        recording, _, _ = recorded(people=people)
        return [(one.at, one.prompt, one.tokens, one.latency) for one in recording.arrived()]

    assert seen(0) == seen(1)
    assert len(seen(0)) == 120


def test_a_hook_that_does_not_return_in_the_simulation_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from scheduling import policy\nclass Policy(policy.Policy):\n    def order(self, waiting, now):\n"
        "        while True: pass\n"
    )
    monkeypatch.setattr(observed, "limited", partial(limited, 0.1))
    out = io.StringIO()
    endless = policies.get_policy(str(path))
    observed.converse(lambda rows, ask: {"order": endless.order([], 0.0)}, io.StringIO('{"ask": {}}\n'), out)
    assert "order() of mine.py, line 4, took more than" in json.loads(out.getvalue())["problem"]


def test_an_answer_that_is_no_json_is_a_problem() -> None:
    out = io.StringIO()
    observed.converse(lambda rows, ask: {"mean": float("nan")}, io.StringIO('{"ask": {}}\n'), out)
    assert "ValueError" in json.loads(out.getvalue())["problem"]


def test_the_law_is_scaled_to_the_time_of_all_steps() -> None:
    run = served("dynamic", inferences())
    steps = [step_of_members(record.members, padded=False) for record in run.iterations]
    seconds = [record.seconds * (1.5 if k % 9 == 0 else 1) for k, record in enumerate(run.iterations)]
    law, error = observed_law.fit(steps, seconds)
    assert sum(map(law.seconds, steps)) == pytest.approx(sum(seconds))
    assert 0.03 < error < 0.2


def test_the_law_of_a_mixture_of_experts_is_found_in_its_own_steps() -> None:
    mixture = Affine(base=0.01, decode=1e-4, experts=0.05, chosen=1 / 16)
    steps = [decoding(rows, 100 * rows, 100) for rows in range(1, 33)] * 60
    law, error = observed_law.fit(steps, [mixture.seconds(step) for step in steps])
    assert error < 0.001
    assert law.seconds(decoding(64, 6400, 100)) == pytest.approx(mixture.seconds(decoding(64, 6400, 100)), rel=0.02)


def test_a_single_outlier_does_not_change_the_fit() -> None:
    run = served("dynamic", inferences())
    steps = [step_of_members(record.members, padded=False) for record in run.iterations]
    seconds = [record.seconds for record in run.iterations]
    at = next(k for k, step in enumerate(steps) if step.decodes > 2)
    for taken in (1e-6, 60.0):
        law, error = observed_law.fit(steps, [*seconds[:at], taken, *seconds[at + 1 :]])
        assert error < 0.03
        assert law.seconds(steps[at]) == pytest.approx(seconds[at], rel=0.05)
