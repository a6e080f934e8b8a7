"""Programs in a closed loop, against cases worked out by hand: each step takes one second, prompts have one token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import policies
from client.workloads.programs import KINDS, Call, draw, joined
from costs.cost import Host
from costs.published import Constant
from policies import dynamic
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate import workloads
from simulate.__main__ import main
from simulate.best import program_blame, programs
from simulate.fleet.plan import parse_limit
from simulate.rows import Rows
from simulate.simulator import Run, simulate
from tests.support.simulate import run_command

SECOND = Constant(a=1.0, b=0.0)
Program = tuple[float, list[Call]]


def call(after: tuple[int, ...], answer: int, tool_s: float = 0.0) -> Call:
    return Call(after, tool_s, None, 1, answer)


def chain(at: float, *answers: int) -> Program:
    return at, [call((i - 1,) if i else (), answer) for i, answer in enumerate(answers)]


def serve(
    rows: Rows, policy: str, slots: int = 1, host: Host | None = None, pages: int = 0, fast: bool = True, **options: Any
) -> Run:
    scheduler = Scheduler(policies.get_policy(policy, slots, options), PagePool(pages, 16) if pages else None)
    return simulate(scheduler, rows.sequences(), SECOND, host, fast_forward=fast)


def times_of(run: Run) -> list[float]:
    assert run.loop is not None
    return list(run.loop.times(run.host.alpha1).values())


def times(some: list[Program], policy: str = "dynamic", *args: Any, **options: Any) -> list[float]:
    return times_of(serve(workloads.of_calls(joined(some), instructions=0), policy, *args, **options))


def least(some: list[Program], slots: int = 1) -> float:
    loop = workloads.of_calls(joined(some), instructions=0).sequences()
    return programs.bounds(loop, loop.sequences, SECOND, slots)[0]


TOOL: list[Program] = [(0.0, [call((), 2), call((0,), 2, 5.0)])]
NEWCOMER = [chain(0.0, 2, 2), chain(0.0, 2, 4), chain(5.0, 1)]
LATE = [chain(0.0, 2, 2, 2), chain(1.0, 2)]


def test_a_call_is_sent_when_the_one_before_is_answered_and_its_tool_is_done() -> None:
    run = serve(workloads.of_calls(joined(TOOL), instructions=0), "dynamic")
    assert [seq.arrived_at for seq in run.sequences] == [0, 7]
    assert times_of(run) == [9]


def test_the_host_delays_every_call_of_a_chain() -> None:
    assert times(TOOL, host=Host(alpha0=0.5, alpha1=0.25)) == [10.5]


def test_a_reduce_waits_for_the_slowest_of_its_parents() -> None:
    assert times([(0.0, [call((), 2), call((0,), 4), call((0,), 2), call((1, 2), 2)])], slots=2) == [8]


def test_in_a_closed_loop_fcfs_lets_a_newcomer_in_between_two_calls_of_a_program() -> None:
    assert times(LATE) == [8, 3]


def test_bounds_of_cases_worked_out_by_hand() -> None:
    assert least(TOOL) == 9
    assert least(NEWCOMER) == pytest.approx(16 / 3)
    assert least(LATE) == 5


def drawn(kind: str, number: int = 12, seed: int = 3) -> Rows:
    """Return programs whose steps of a second overlap."""
    return workloads.of_calls(draw(kind, np.linspace(0, 5, number).tolist(), seed))


LOOPS = [*policies.names(), *(f"dynamic+{order}" for order in policies.order_names())]


@pytest.mark.parametrize("policy", LOOPS)
def test_every_policy_sends_each_call_a_tool_after_its_parents_and_none_beats_the_bound(policy: str) -> None:
    rows = drawn("agents", 25)
    run = serve(rows, policy, 4, pages=2001)
    assert run.loop is not None
    by_id = {seq.id: seq for seq in run.sequences}
    assert len(by_id) == len(run.sequences)
    if not run.loop.times() or len(run.sequences) < len(rows.at):
        assert run.answered < run.requests  # it refused some
        return
    for i, call in enumerate(rows.calls or ()):
        ends = [by_id[str(parent)].finished_at or 0.0 for parent in call.after]
        assert by_id[str(i)].arrived_at == max(ends, default=call.at) + call.tool_s
    assert np.mean(times_of(run)) >= programs.of(run, SECOND, 4, 16)["least_mean_s"] - 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["dynamic", "dynamic+plas"])
def test_fast_forward_changes_no_time(kind: str, policy: str) -> None:
    found = [times_of(serve(drawn(kind), policy, 4, fast=fast)) for fast in (True, False)]
    assert found[0] == found[1]


def test_a_call_that_is_refused_ends_its_program() -> None:
    run = serve(workloads.of_calls(joined(LATE), instructions=0), "dynamic+rpm", limit=2, period=1000)
    assert [seq.finish_reason for seq in run.sequences] == ["length", "length", "refused"]
    assert times_of(run) == [3]
    found = programs.of(run, SECOND, 1, 0)
    assert (found["completed"], found["failed"], "least_mean_s" in found) == (1, 1, False)


def test_a_program_too_long_for_a_context_is_left_out_as_a_whole() -> None:
    rows = drawn("map-reduce", 40).fitting(1024)
    assert rows.notes
    assert {call.program for call in rows.calls or ()} < {call.program for call in drawn("map-reduce", 40).calls or ()}
    assert (rows.prompt + rows.output).max() <= 1024
    assert len(times_of(serve(rows, "dynamic", 8))) == len({call.program for call in rows.calls or ()})


def test_in_an_open_loop_calls_come_before_their_parents_have_ended() -> None:
    rows = drawn("react").in_open_loop()
    run = serve(rows, "dynamic", 1)
    ends = {seq.session: seq.finished_at or 0.0 for seq in run.sequences}
    assert any(seq.arrived_at < ends[seq.session] for seq in run.sequences)
    assert "misleads" in rows.notes[0]


def test_blame_names_the_program_that_delayed_another_and_its_call() -> None:
    rows = workloads.of_calls(joined(LATE), instructions=0)
    found = program_blame.of(
        lambda: (Scheduler(policies.get_policy("dynamic", 1)), rows.sequences()), SECOND, Host(), "program-0"
    )
    assert (found["took_s"], found["alone_s"], found["residual_s"]) == (8, 6, 0)
    assert found["by"] == [{"program": "program-1", "s": 2, "call": 1, "call_s": 2}]


def test_a_capacity_may_have_a_limit_of_program_times(capsys: pytest.CaptureFixture[str]) -> None:
    run = serve(workloads.of_calls(joined(LATE), instructions=0), "dynamic")
    assert parse_limit("p100:program:9").value(run, 0) == max(times_of(run))
    assert main(["plan", "dynamic", "--limit", "mean:program:9"]) == 2
    assert "needs programs" in capsys.readouterr().err


class Turning(dynamic.Policy):
    """Refuses the calls that follow when it has seen two programs."""

    def __init__(self, max_batch_size: int) -> None:
        super().__init__(max_batch_size)
        self.seen: set[str] = set()

    def refuse(self, seq: Sequence, now: float) -> bool:
        self.seen.add(seq.program)
        return now > 0 and len(self.seen) == 2


def test_blame_leaves_out_the_others_without_which_a_program_fails() -> None:
    rows = workloads.of_calls(joined([chain(0.0, 2, 2), chain(0.0, 2), chain(0.0, 2)]), instructions=0)
    found = program_blame.of(lambda: (Scheduler(Turning(1)), rows.sequences()), SECOND, Host(), "program-0")
    assert (found["by"], found["left_out"]) == ([], 2)


def test_results_by_program_are_in_the_json_the_csv_and_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "run dynamic dynamic+plas --workload map-reduce --num 8 --rate 1 --max-batch-size 2 --no-plots --out"
    told, _ = run_command(capsys, *line.split(), str(tmp_path / "out"))
    found = told["runs"][0]["simulation"]["programs"]
    assert found["completed"] == 8
    assert found["mean_slowdown"] >= 1 >= found["jain_slowdown"]
    assert found["above_least_mean"] >= 0
    assert len((tmp_path / "out/programs.csv").read_text().splitlines()) == 17
    assert "programs in a closed loop" in (tmp_path / "out/table.md").read_text()
