"""Speculative decoding in the simulator and in front of mock models: how often drafts are accepted, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

import policies
from app import create_app, start
from config import Config
from costs import drafting
from costs.cost import Affine
from costs.steps import Step, step_of, step_of_members
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from scheduling.speculation import Speculator
from simulate.simulator import Run, simulate
from tests.support import points
from tests.support.simulate import run_command, sequences

WEIGHTS = Affine(base=0.02, token=0.0001, context=1e-7)  # a step reads the weights; more rows cost little


def served(
    speculator: Speculator | None, cost: Affine = WEIGHTS, *, pages: int = 0, tokens: int = 60, **options: Any
) -> Run:
    pool = PagePool(pages, 16, prefix_cache=False) if pages else None
    scheduler = Scheduler(policies.get_policy("dynamic", 8), pool, 256, speculator=speculator)
    rows = sequences((0.05 * i, 9 + i % 7, tokens + i % 5) for i in range(40))
    return simulate(scheduler, rows, cost, records=True, **options)


def records(run: Run) -> list[dict[str, Any]]:
    return [iteration.to_dict() for iteration in run.iterations]


@pytest.mark.parametrize("drafts", ["4", "auto"])
def test_the_seed_decides_which_drafts_are_accepted(drafts: str) -> None:
    first, second, other = (records(served(drafting.speculator(0.6, drafts, seed))) for seed in (1, 1, 2))
    assert first == second
    assert first != other


@pytest.mark.parametrize(("acceptance", "drafts"), [(0.0, 3), (0.5, 2), (0.8, 4), (1.0, 8)])
def test_a_step_yields_as_many_tokens_as_the_formula_says(acceptance: float, drafts: int) -> None:
    """Leviathan et al. 2023, equation 1: (1 - p^(k + 1)) / (1 - p)."""
    run = served(drafting.speculator(acceptance, str(drafts)), tokens=400)
    decoded, accepted = (sum(n) for n in zip(*((len(s.output_ids) - 1, s.accepted) for s in run.sequences)))
    expected = sum(acceptance**j for j in range(drafts + 1))
    assert decoded / (decoded - accepted) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("pages", [0, 40])
def test_leaps_change_nothing_where_there_are_drafts(pages: int) -> None:
    runs = [
        served(drafting.speculator(0.7, "auto"), pages=pages, fast_forward=fast_forward)
        for fast_forward in (False, True)
    ]
    assert records(runs[0]) == records(runs[1])
    assert sum(seq.accepted for seq in runs[0].sequences) > 500


def test_drafts_make_steps_fewer_where_rows_are_cheap_and_none_change_nothing() -> None:
    plain = served(None)
    assert records(plain) == records(served(drafting.speculator(0.9, "0")))
    assert served(drafting.speculator(0.7, "auto")).makespan < 0.7 * plain.makespan


def test_a_draft_costs_a_row_but_the_context_is_read_once() -> None:
    decoding, drafted = (Sequence([1] * 10, 50, output_ids=[1]) for _ in range(2))
    decoding.computed = drafted.computed = 10
    plan = Plan(1, 0.0, [decoding, drafted], [1, 4], drafts=[[], [5, 6, 7]])
    assert step_of(plan) == Step(1 + 4, 11 + 14, longest=14, widest=1, work=11 + 4 * 14)


def test_a_record_costs_what_its_plan_costs_if_no_draft_is_rejected() -> None:
    steps: list[Step] = []

    class Noting(Affine):
        def __call__(self, plan: Plan) -> float:
            steps.append(step_of(plan))
            return super().__call__(plan)

    run = served(drafting.speculator(1.0, "5"), Noting(base=1.0))
    assert [step_of_members(record.members, padded=False) for record in run.iterations] == steps


def test_recorded_drafts_are_computed_again_in_the_same_steps() -> None:
    run = served(drafting.speculator(0.6, "5"), pages=40)
    assert any(seq.preemptions for seq in run.sequences) or all(record.pages_total for record in run.iterations)
    assert records(served(drafting.replaying(records(run), 5), pages=40)) == records(run)
    fewer = served(drafting.replaying(records(run), 2), pages=40)
    assert 0 < sum(seq.drafted for seq in fewer.sequences) < sum(seq.drafted for seq in run.sequences)
    assert fewer.steps > run.steps
    assert drafting.replaying(records(served(None)), 5) is None


def client_of(**settings: Any) -> FlaskClient:
    app = create_app(Config(policy="dynamic", model="mock:constant@1000", **settings))
    start(app).join()
    return app.test_client()


def test_a_mock_server_gives_the_same_text_in_fewer_steps() -> None:
    body = {"prompt": "To be", "num_tokens": 200}
    answers = []
    for settings in ({}, {"speculate": "auto", "drafts": "4", "mock_acceptance": 0.8}):
        client = client_of(**settings)
        try:
            answers.append(client.post("/inference", json=body).get_json())
            drafts = client.get("/stats").get_json()["engine"]["drafts"]
        finally:
            client.application.extensions["service"].stop()
    plain, speculated = answers
    assert plain["completion"] == speculated["completion"]
    assert drafts["accepted"] > 80
    assert drafts["tokens"] <= 4 * drafts["times"]


@pytest.mark.parametrize(
    "command", points(1, "run dynamic", "plan dynamic --slots 4", "fleet dynamic --router round-robin")
)
def test_drafts_make_every_simulated_server_faster(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = [*command.split(), "--num", "80", "--rate", "1", "--cost", "splitwise"]
    plain, _ = run_command(capsys, *line)
    faster, _ = run_command(capsys, *line, "--acceptance", "0.8")
    figure = {
        "run": lambda found: -found["mean_e2el_ms"],
        "plan": lambda found: found["capacities"][0]["rate"],
        "fleet": lambda found: -found["routers"][0]["mean_e2el_s"],
    }[line[0]]
    assert figure(faster) > figure(plain)
