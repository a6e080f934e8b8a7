"""Calls of programs in a replay: they come as long after their parents as they did, whenever those are answered."""

from __future__ import annotations

from typing import Any

import pytest

import policies
from batching import Inference
from client.data import Call
from costs.published import Constant
from observe.replay.question import Server
from observe.replay.recording import Recording
from observe.replay.what_if import WhatIf
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from serving.call import Call as Asked
from simulate.closed_loop import ClosedLoop
from simulate.measured import what_if
from simulate.simulator import simulate
from simulate.trace import Seen, Trace
from tests.support.observe import COST, SLOTS, answer_to, manager, watch

TURNS, PAUSE = 6, 0.5


def server() -> Server:
    """Return what has served an agent of six turns beside fourteen single requests, one after the other."""
    people: list[Inference] = []
    calls: list[Call] = []
    for turn in range(TURNS):
        before = (f"turn {turn - 1}",) if turn else ()
        people.append(Inference("", 9, [turn] * 20, id=f"turn {turn}", call=Asked("agent", "", "", turn + 1, before)))
        calls.append(Call((turn - 1,) if turn else (), PAUSE if turn else 0.0, None, 20, 9, program="agent"))
    for number in range(14):
        people.append(Inference("", 40, [50 + number] * 20, id=f"{number}"))
        people[-1].sequence.arrived_at = 0.05 * number
        calls.append(Call((), 0.0, None, 20, 40, program=f"{number}"))
    scheduler = Scheduler(policies.get_policy("nobatch", SLOTS), PagePool(2000, 16), 256)
    run = simulate(scheduler, ClosedLoop([one.sequence for one in people], calls), COST, records=True)
    serving = manager("nobatch")
    recording = Recording(clock=lambda: run.ended)
    watch(recording, run, people)
    return Server(serving, recording)


def test_under_another_policy_the_calls_of_a_program_come_when_their_parents_are_answered() -> None:
    served = server()
    requests = served.recording.arrived()
    assert [one.after for one in requests if one.program == "agent"] == [
        (),
        *((f"turn {i}",) for i in range(TURNS - 1)),
    ]
    answer = answer_to(served.question(requests, policies=["dynamic"], workload=None), what_if.answer_from)
    measured, again, other = answer["lanes"]
    came = [request["t"] for request in answer["requests"]]
    turns = [k for k, one in enumerate(requests) if one.program == "agent"]
    assert "arrived" not in measured
    assert again["arrived"] == pytest.approx(came, rel=0.05, abs=0.2)
    assert [other["arrived"][k] == came[k] for k in range(len(came)) if k not in turns] == [True] * 14
    assert other["arrived"][turns[-1]] < came[turns[-1]] / 2
    assert other["makespan_s"] < again["makespan_s"] / 2


def test_blame_names_what_delayed_the_program_of_a_request_and_its_call() -> None:
    one = WhatIf(server(), 1024)
    answer = answer_to(one._server.question(one._beside("turn 5"), blame="turn 5"), what_if.answer_from)
    program = answer["program"]
    assert (program["name"], program["calls"], program["trusted"]) == ("agent", TURNS, True)
    assert program["simulated_ms"] == pytest.approx(program["measured_ms"], rel=0.05)
    assert 1000 * PAUSE * (TURNS - 1) < program["alone_ms"] < program["simulated_ms"]
    assert {other["id"] for other in program["others"]} <= {f"{i}" for i in range(14)}
    worst = program["others"][0]
    assert worst["ms"] > 100
    assert worst["call"] in {f"turn {i}" for i in range(TURNS)}
    assert answer_to(one._server.question(one._beside("3"), blame="3"), what_if.answer_from)["program"] is None


def test_a_call_keeps_its_pause_after_the_last_of_its_parents() -> None:
    seen = [
        Seen(0.0, 1, 2, 2.0, program="p"),
        Seen(0.0, 1, 4, 6.0, program="p"),
        Seen(7.0, 1, 1, 1.0, program="p", after=(0, 1), deadline=9.0),  # a second after the last answer
        Seen(1.0, 1, 1, 1.0),
    ]
    rows: list[Any] = [Trace(seen, closed=closed).sequences() for closed in (True, False)]
    closed, open_ = (
        simulate(Scheduler(policies.get_policy("dynamic", 4)), some, Constant(a=1.0, b=0.0)) for some in rows
    )
    assert {seq.id: seq.arrived_at for seq in closed.sequences}["2"] == 5.0
    assert {seq.id: seq.deadline for seq in closed.sequences}["2"] == 7.0
    assert {seq.id: seq.arrived_at for seq in open_.sequences}["2"] == 7.0
    assert {seq.program for seq in closed.sequences} == {"p", ""}
