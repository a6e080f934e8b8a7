"""`validate`: a server beside the simulator. The servers here are simulated runs, but for one real process at the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from client.data import Planned
from client.report.measure import Outcome
from client.workloads import catalog, corpus
from client.workloads.arrivals import Arrivals
from costs import published
from costs.cost import Cost, Host, Scaled
from simulate.__main__ import main
from simulate.measured import comparison, validate
from simulate.measured.comparison import Comparison, agreement, batch_sizes, steps_of, token_gaps
from simulate.measured.served import Served
from simulate.measured.validate import Validation
from simulate.result import chunks_of, outcome
from simulate.scenario import Chosen
from simulate.simulator import Run

ENGINE = {"max_batch_size": 8, "max_tokens_per_step": 256, "kv": None}
LAW = published.make("oracle-a")
SLOWER = Scaled(LAW, 1.56)
NONE = Host()


def asked(policy: str, trace: Sequence[Planned], engine: dict[str, Any] = ENGINE) -> Served:
    """Return a trace of prompts of different lengths that no server has served yet."""
    outcomes = [
        Outcome(i, p.num_tokens, p.at, p.at, p.at, p.num_tokens, prompt_tokens=5 + i % 9, id=f"r{i}", max_tokens=p.num_tokens)
        for i, p in enumerate(trace)
    ]  # fmt: skip
    return Served(Chosen(policy), outcomes, [], engine)


def run_of(policy: str, cost: Cost, trace: Sequence[Planned], engine: dict[str, Any] = ENGINE) -> Run:
    return asked(policy, trace, engine).simulate(cost, Host(), records=True)


def alone(cost: Cost, host: Host = NONE) -> Served:
    """Return requests that a server served one at a time, whose steps take what `cost` says."""
    return served_by("dynamic", cost, [Planned(i, 10.0 * i, "", n) for i, n in enumerate((4, 32, 4, 32))], host=host)


def served_by(
    policy: str, cost: Cost, trace: Sequence[Planned], engine: dict[str, Any] = ENGINE, host: Host = NONE
) -> Served:
    """Return what a server would have done whose steps take what `cost` says."""
    run = asked(policy, trace, engine).simulate(cost, host, records=True)
    chunks = chunks_of(run)
    outcomes = [outcome(i, seq, run, chunks) for i, seq in enumerate(run.sequences)]
    outcomes = [replace(o, queue=(o.queue or 0.0) - host.alpha0) for o in outcomes]  # of which a server does not know
    return Served(Chosen(policy), outcomes, steps_of(run), engine)


def both(predicted: Cost, measured: Cost, rate: float, policy: str = "dynamic") -> Validation:
    """Validate one cost model against a server that takes what another says; the host takes no time."""
    trace = validate.draw(rate, 60, seed=1)
    served = served_by(policy, measured, trace)
    return Validation(Host(), served.simulate(predicted, Host(), records=True), served)


def beyond(validation: Validation) -> set[str]:
    return {c.name for c in validation.compared if not c.good}


def figure(validation: Validation, name: str) -> Comparison:
    (found,) = (c for c in validation.compared if c.name == name)
    return found


@pytest.mark.parametrize("policy", ["dynamic", "static", "chunked"])
def test_a_server_that_is_what_the_model_says_is_met_in_every_figure(policy: str) -> None:
    found = both(LAW, LAW, 3.0, policy)
    assert {"mean TTFT", "p99 ITL", "p99 latency", "mean batch size"} < {c.name for c in found.compared}
    for c in found.compared:
        assert c.predicted == pytest.approx(c.measured, rel=1e-6), c
    assert agreement(*found.steps) == 1
    told = found.to_dict()
    assert told["batch_sizes"]["predicted"] == told["batch_sizes"]["measured"]
    json.dumps(told, allow_nan=False)


def test_a_wrong_model_fails_below_saturation_where_the_makespan_cannot_show_it() -> None:
    found = both(LAW, SLOWER, 1.0)
    assert figure(found, "utilization").measured < comparison.SATURATED
    makespan = figure(found, "makespan")
    assert abs(makespan.error) < 0.03
    assert makespan.bound is None
    assert beyond(found) == {"mean latency", "p99 latency", "mean TTFT"}


def test_near_saturation_latencies_have_more_room_and_the_makespan_is_bounded() -> None:
    found = both(LAW, Scaled(LAW, 1.08), 40.0)
    assert figure(found, "utilization").measured > comparison.SATURATED
    assert figure(found, "p99 latency").bound == comparison.SATURATED_LATENCY
    assert beyond(found) == {"makespan"}


def test_requests_in_the_same_batches_agree_whenever_that_was() -> None:
    trace = validate.draw(3.0, 30, seed=2)
    run = steps_of(run_of("dynamic", LAW, trace))
    later = [{**record, "t": record["t"] + 1.0} for record in run]
    assert agreement(run, later) == 1
    assert agreement(run, run[: len(run) // 2]) == pytest.approx(0.5, abs=0.02)
    assert agreement(run, steps_of(run_of("nobatch", LAW, trace))) < 0.5
    assert agreement(run, []) == 0


def test_a_row_that_is_held_belongs_to_the_batch_and_one_that_pauses_does_not() -> None:
    def record(*phases: str) -> dict[str, Any]:
        return {"members": [{"id": p, "phase": p} for p in phases]}

    assert batch_sizes([record("decode", "held", "idle"), record("prefill")]) == {2: 1, 1: 1}


def test_gaps_are_between_the_steps_that_gave_tokens() -> None:
    run = run_of("chunked", LAW, validate.draw(9.0, 40, seed=3), {**ENGINE, "max_tokens_per_step": 8})
    assert sorted(token_gaps(steps_of(run))) == pytest.approx(sorted(run.gaps))


def test_the_hosts_part_is_what_single_requests_take_beyond_the_steps_and_the_model() -> None:
    host = Host(alpha0=0.003, alpha1=0.005, sigma=0.002)
    found = alone(LAW, host).host(LAW)
    assert (found.alpha0, found.alpha1, found.sigma) == pytest.approx((0.003, 0.005, 0.002))
    assert alone(LAW).host(SLOWER) == Host(alpha0=pytest.approx(0), alpha1=pytest.approx(0))


@pytest.mark.parametrize(
    ("engine", "slower"),
    [
        ({"max_batch_size": 8, "kv": {"pages_total": 1000, "page_size": 16}}, False),
        ({"max_batch_size": 8, "kv": {"pages_total": 12, "page_size": 16}}, True),
        ({"max_batch_size": 2, "kv": None}, True),
    ],
)
def test_a_server_is_simulated_with_the_room_that_it_has(engine: dict[str, Any], slower: bool) -> None:
    trace = validate.draw(9.0, 60, seed=1)
    run = run_of("dynamic", LAW, trace, {**engine, "max_tokens_per_step": 64})
    assert (run.waiting.mean() > 0.1) == slower


def test_prompts_that_the_server_had_cached_are_not_computed_by_the_simulator_either() -> None:
    law = published.make("affine", {"base": 0.0, "token": 1.0, "row": 0.0})
    (sent,) = asked("dynamic", [Planned(0, 0.0, "", 4)]).outcomes
    seconds = [
        Served(Chosen("dynamic"), [replace(sent, prompt_tokens=50, cached_tokens=n)], [], ENGINE).simulate(law, Host()).busy
        for n in (0, 48)
    ]  # fmt: skip
    assert seconds == pytest.approx([53, 5])


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let servers be simulated ones at LAW's pace; return the flags that the last was started with."""
    started: list[str] = []

    def serve(chosen: Chosen, given: Sequence[str], trace: Sequence[Planned], *_: Any) -> tuple[Served, Served]:
        started[:] = given
        return alone(LAW), alone(LAW), served_by(chosen.name, LAW, trace, {**ENGINE, "max_batch_size": 32})

    monkeypatch.setattr(validate, "serve", serve)
    return started


def test_the_servers_flags_are_taken_and_passed_on(flags: list[str]) -> None:
    line = "validate dynamic --cost oracle-a --model bard --dtype float32 --prefix-cache off"
    assert main([*line.split(), "--num", "20"]) == 0
    assert flags == [
        "--max-batch-size", "32", "--max-tokens-per-step", "256", "--model", "bard", "--dtype", "float32",
        "--prefix-cache", "off",
    ]  # fmt: skip


def test_within_the_bounds_the_exit_status_is_0_and_beyond_one_it_is_1(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["validate", "dynamic", "static", "--num", "40", "--rate", "2", "--cost"]
    assert main([*line, "oracle-a"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [run["policy"] for run in told["runs"]] == ["dynamic", "static"]
    assert all(run["agreement"] == 1 for run in told["runs"])
    assert main([*line, "oracle-a", "--cost-option", "base=0.02"]) == 1
    captured = capsys.readouterr()
    assert not json.loads(captured.out)["good"]
    assert "error: dynamic: p99 latency is off by" in captured.err


def test_what_is_printed_has_every_figure_on_eighty_columns_and_the_bounds(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = "validate chunked+vtc-pred --cost oracle-a --cost-option base=0.02 --num 60 --rate 9"
    assert main(line.split()) == 1
    told = capsys.readouterr().err
    for words in ("mean TTFT", "p99 ITL", "p99 latency", "batch size", "agreement: ", "bounds: ", "error: "):
        assert words in told
    tables = told.partition("bounds: ")[0]
    assert max(map(len, tables.splitlines())) <= 80


def test_without_cost_a_mock_server_is_predicted_by_its_own(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "dynamic", "--model", "mock:oracle-a", "--num", "20"]) == 0
    assert main(["validate", "dynamic", "--model", "mock:oracle-a@0.5", "--num", "20"]) == 1
    compared = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"][0]["compared"]
    ratio = {c["name"]: c["predicted"] / c["measured"] for c in compared}
    assert ratio["mean ITL"] == pytest.approx(2, abs=0.1)


def test_without_cost_the_engine_of_the_model_is_timed_first(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def probe(given: list[str], facts: Any) -> Any:
        asked.append(given)
        return lambda points: [LAW.seconds(point.step) for point in points]

    monkeypatch.setattr("simulate.measured.calibrate.probe", probe)
    main(["validate", "dynamic", "--model", "bard", "--dtype", "float32", "--quantize", "int8", "--num", "20"])
    assert dict(zip(asked[0][::2], asked[0][1::2])) == {
        "--model": "bard", "--load-format": "auto", "--dtype": "float32", "--quantize": "int8", "--kv-dtype": "auto",
        "--threads": "0", "--context": "1024",
    }  # fmt: skip


def test_programs_are_simulated_in_a_closed_loop_and_their_times_compared() -> None:
    planned = catalog.draw("agents", 12, Arrivals("poisson", 2.0), 1, corpus.load()).planned
    asked_once = replace(asked("dynamic", planned), calls=[p.call for p in planned if p.call])
    run = asked_once.simulate(LAW, NONE, records=True)
    chunks = chunks_of(run)
    outcomes = sorted((outcome(int(seq.id[1:]), seq, run, chunks) for seq in run.sequences), key=lambda o: o.index)
    served = replace(asked_once, outcomes=outcomes, records=steps_of(run))
    for law in (LAW, SLOWER):
        found = comparison.compare(served.simulate(law, NONE, records=True), served)
        (mean,) = (c for c in found if c.name == "mean program time")
        assert mean.good == (law is LAW) == (mean.error == pytest.approx(0))
    assert run.loop
    assert mean.measured == pytest.approx(np.mean([*run.loop.times().values()]))


def test_a_comparison_fails_above_its_bound() -> None:
    assert Comparison("makespan", 10.4, 10.0, 0.05).good
    assert not Comparison("makespan", 9.4, 10.0, 0.05).good
    assert Comparison("p99 latency", 20.0, 10.0).good
    assert not Comparison("p99 latency", 1.0, 0.0, 0.1).good


@pytest.mark.process
def test_a_real_server_is_measured_step_by_step(capsys: pytest.CaptureFixture[str]) -> None:
    line = "validate dynamic --model mock:oracle-a@4 --num 12 --rate 12 --max-batch-size 4 --access-log off"
    code = main(line.split())
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert code == (0 if told["good"] else 1)
    (run,) = told["runs"]
    compared = {c["name"]: c for c in run["compared"]}
    assert {"mean TTFT", "p99 ITL", "p99 latency", "makespan"} < set(compared)
    assert all(c["measured"] > 0 for c in compared.values())
    tokens = sum(p.num_tokens for p in validate.draw(12.0, 12, 0))
    rows = sum(int(size) * count for size, count in run["batch_sizes"]["measured"].items())
    assert rows == tokens  # each row of a step is a token, since no prompt is cut
    assert max(map(int, run["batch_sizes"]["measured"])) <= 4
    assert 0 < run["agreement"] <= 1  # how much more depends on what else the machine does


def test_a_server_that_does_not_start_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "dynamic", "--cost", "oracle-a", "--model", "no/such/folder"]) == 1
    assert "unknown model 'no/such/folder'" in capsys.readouterr().err
