"""What if: lanes of other policies on the requests that were served, and how far they can be trusted."""

from __future__ import annotations

import inspect
import itertools
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from costs.cost import Affine
from costs.drafting import speculator
from costs.published import LlmMock
from costs.steps import decoding
from observe.replay.question import Server
from observe.replay.recording import Recording, Served
from observe.replay.what_if import WhatIf, Workload, latest
from scheduling.iteration import Members, SlotSteps
from scheduling.policy import Policy
from scheduling.stretches import Stretch, Stretches
from serving.inference import InferenceError
from simulate.measured import observed, observed_law
from simulate.measured import what_if as simulated
from tests.support import SOON, wait_until
from tests.support.observe import COST, Uneven, answer_to, inferences, manager, recorded, served, watch
from tests.support.scheduling import drive, make_scheduler, requests


def expanded(records: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each step of records with `repeat`, as the page does."""
    for record in records:
        for k in range(record["repeat"]):
            last = k == record["repeat"] - 1
            yield record | {
                "n": record["n"] + k,
                "members": [m | {"computed": m["computed"] + k * m["tokens"]} for m in record["members"]],
                "joined": [] if k else record["joined"],
                "left": record["left"] if last else [],
            }


@pytest.mark.parametrize("policy", ["nobatch", "static", "dynamic", "chunked"])
def test_stretches_hold_every_step_of_a_run(policy: str) -> None:
    trace = [(i * 7, 3 + i * 5 % 40, 1 + i * 11 % 23) for i in range(40)]
    run = drive(make_scheduler(policy, 6, budget=32), requests(*trace))
    kept = Stretches()
    for iteration in run.iterations:
        kept.add(iteration)
    assert len(kept.kept) < len(run.iterations)
    again = list(expanded([stretch.to_dict() for stretch in kept.kept]))
    names = ("n", "queue", "joined", "left", "slot_steps", "blocked_by", "members")
    for one, step in zip(again, run.records(), strict=True):
        assert [one.get(name) for name in names] == [step.get(name) for name in names]


class Here(WhatIf):
    """Answers in this process."""

    def answer_of(self, policies: list[str], count: int = 400, **more: Any) -> dict[str, Any]:
        workload = more.get("workload")
        chosen = [] if workload else self._requests(count, more.get("span"))
        drawn = workload and {**workload.__dict__, "count": count, "context": 1024}
        asked = {"policies": policies, "options": more.get("options", {}), "workload": drawn}
        return answer_to(self._server.question(chosen, **asked), simulated.answer_from)

    def blame_of(self, id: str) -> dict[str, Any]:
        return answer_to(self._server.question(self._beside(id), blame=id), simulated.answer_from)


def here(policy: str = "static") -> tuple[Here, Any]:
    recording, run, server = recorded(policy)
    return Here(Server(server, recording), 1024), run


def test_the_simulated_lane_of_the_served_policy_is_close_to_the_measured_one() -> None:
    one, run = here("static")
    answer = one.answer_of(["nobatch", "static", "dynamic"])
    assert [(lane["policy"], lane["measured"]) for lane in answer["lanes"]] == [
        ("static", True), ("static", False), ("nobatch", False), ("dynamic", False),
    ]  # fmt: skip
    assert max(map(abs, answer["error"].values())) < 0.03
    bound = answer["bound"]
    assert sum(bound["above_by"].values()) == pytest.approx(bound["above"])
    assert bound["latency_mean_s"] * (1 + bound["above"]) == pytest.approx(
        answer["lanes"][1]["latency_mean_s"], rel=0.02
    )
    measured, again, nobatch, dynamic = answer["lanes"]
    assert measured["requests"] == len(run.sequences) == 120
    assert sum(record["repeat"] for record in measured["records"]) == len(run.iterations)
    assert measured["held"] == pytest.approx(again["held"], rel=0.1)
    assert any(member["phase"] == "held" for record in again["records"] for member in record["members"])
    assert dynamic["held"] == nobatch["held"] == 0
    assert dynamic["latency_p99_s"] < again["latency_p99_s"] < nobatch["latency_p99_s"]


def test_a_few_requests_in_a_backlog_are_simulated_with_the_queue_that_they_found() -> None:
    answer = here("dynamic")[0].answer_of(["nobatch"], 8)
    assert max(map(abs, answer["error"].values())) < 0.05


@pytest.mark.parametrize("drafts", ["auto", "4"])
def test_the_drafts_that_requests_had_are_simulated_with_every_policy(drafts: str) -> None:
    recording, run, server = recorded("dynamic", speculator=speculator(0.7, drafts))
    answer = Here(Server(server, recording), 1024).answer_of(["chunked", "static"])
    assert max(map(abs, answer["error"].values())) < 0.1
    accepted = [
        sum(draft["accepted"] for record in lane["records"] for draft in record.get("drafts", ()))
        for lane in answer["lanes"]
    ]
    measured, dynamic, chunked, static = accepted
    assert measured == sum(seq.accepted for seq in run.sequences) > 500
    assert dynamic == pytest.approx(measured, rel=0.1)
    assert chunked > 100
    assert static == 0  # it is padded


def test_requests_that_were_not_seen_arriving_leave_without_a_trace() -> None:
    people = inferences()
    run = served("dynamic", people, speculator=speculator(0.7, "4"))
    recording = Recording(clock=lambda: run.ended)
    unseen = people[::3]  # as copies and background work are
    for one in people:
        if one not in unseen:
            recording.on_arrival(one)
    by_id = {one.id: one for one in people}
    for record in run.iterations:
        recording.observe(record, [by_id[id] for id, _ in record.left])
    window = recording.arrived()
    assert len(window) == len(people) - len(unseen)
    drafted = {seq.id: seq.drafted for seq in run.sequences}
    assert all(sum(count for _, count, _ in one.drafts) == drafted[one.id] for one in window)


def test_a_machine_that_was_often_slow_is_simulated_as_slow() -> None:
    recording, run, server = recorded("dynamic", Uneven(**COST.__dict__))
    answer = Here(Server(server, recording), 1024).answer_of(["static"])
    assert abs(answer["error"]["makespan_s"]) < 0.15
    assert answer["lanes"][0]["makespan_s"] == pytest.approx(run.makespan)


def test_requests_that_came_while_the_loop_woke_are_seen_together() -> None:
    steps = [(1.003, 3.003), (3.003, 5.003), (9.2, 11.2)]
    seen = observed.seen([1.0, 1.001, 1.004, 2.0, 9.0], steps, simulated.LONGEST_WAKE)
    assert seen == [1.003, 1.003, 1.004, 2.0, 9.0]  # the last waited for the policy


def test_lanes_have_the_same_requests_under_the_same_names() -> None:
    one, run = here()
    answer = one.answer_of(["dynamic"])
    assert [request["id"] for request in answer["requests"]] == [seq.id for seq in run.sequences]
    joined = [{id for r in lane["records"] for id in r["joined"]} for lane in answer["lanes"]]
    assert joined == [{str(k) for k in range(120)}] * 3
    for lane in answer["lanes"]:
        steps = list(expanded(lane["records"]))
        assert all(b["n"] == a["n"] + 1 for a, b in itertools.pairwise(steps))
        assert lane["records"][0]["t"] < 1


def test_long_lanes_are_cut_at_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = here()
    whole = one.answer_of(["dynamic"])
    monkeypatch.setattr(simulated, "MAX_WEIGHT", 900)
    cut = one.answer_of(["dynamic"])
    assert whole["cut_s"] is None
    assert all(record["t"] < cut["cut_s"] for lane in cut["lanes"] for record in lane["records"])
    assert cut["lanes"][2]["latency_p99_s"] == whole["lanes"][2]["latency_p99_s"]
    assert len(json.dumps(cut)) < 100_000


def test_a_policy_that_batches_more_than_was_measured_is_named_a_guess() -> None:
    one, _ = here("nobatch")
    answer = one.answer_of(["dynamic"])
    assert [lane.get("extrapolates") for lane in answer["lanes"]] == [None, False, True]


@pytest.mark.parametrize(("rows", "guess"), [(1, True), (3, True), (4, False), (8, False), (9, True)])
def test_steps_far_from_the_measured_sizes_are_a_guess(rows: int, guess: bool) -> None:
    members = Members.of((str(k), k, "decode", 1, 20, 30) for k in range(rows))
    step = Stretch(1, 0.0, 1 / 9, "x", 0, members, [], [], SlotSteps(rows), 0, 0, steps=9, ended=1.0)
    assert simulated.extrapolates([step], False, [decoding(8, 400)]) == guess


def test_what_a_mock_model_costs_is_known_but_for_a_moment_in_each_step() -> None:
    steps = [
        (decoding(rows, 100 * rows, 100), LlmMock().seconds(decoding(rows, 100 * rows, 100)) / 5 + 0.001)
        for rows in (1, 8)
    ]
    law, host, basis = observed_law.law(steps, 0.002, "mock:llm-mock@5")
    assert law.seconds(steps[0][0]) == pytest.approx(LlmMock().seconds(steps[0][0]) / 5)
    assert host.sigma == pytest.approx(0.003)
    assert basis == {"from": "mock:llm-mock@5"}


def test_a_law_of_the_wrong_form_has_a_misfit() -> None:
    steps = [(decoding(rows, 10 * rows), 0.01 * rows) for rows in (1, 8, 64)]
    assert observed_law.misfit(Affine(row=0.02), steps) < 1e-9  # twice as slow in all sizes
    assert observed_law.misfit(Affine(base=0.02), steps) > 0.5


def test_a_workload_of_the_client_is_simulated_without_a_measured_lane() -> None:
    one, _ = here("dynamic")
    answer = one.answer_of(["static"], 30, workload=Workload("uniform", 20.0, 1))
    assert [(lane["policy"], lane["measured"]) for lane in answer["lanes"]] == [("dynamic", False), ("static", False)]
    assert len(answer["requests"]) == 30
    assert answer["error"] is None


def test_a_policy_has_the_options_that_it_is_given_beside_the_served_one_without() -> None:
    one, _ = here("dynamic+boost")
    options = {"dynamic+boost": {"gamma": 1e6}}
    answer = one.answer_of(["dynamic", "dynamic+boost"], 200, options=options)
    _, served, fcfs, slow = answer["lanes"]
    assert [lane["policy"] for lane in (served, slow)] == ["dynamic+boost"] * 2
    assert [served["options"], fcfs["options"], slow["options"]] == [{}, {}, {"gamma": 1e6}]
    assert slow["latency_mean_s"] == fcfs["latency_mean_s"] != served["latency_mean_s"]


def test_a_run_without_the_worst_culprit_lets_a_request_wait_as_much_less_as_was_said() -> None:
    one, run = here("dynamic")
    asked = max(run.sequences, key=lambda seq: seq.scheduled_at - seq.arrived_at)
    answer = one.blame_of(asked.id)
    worst = max(answer["others"], key=lambda other: other["wait_ms"])
    waited = 1000 * (asked.scheduled_at - asked.arrived_at)
    assert worst["wait_ms"] > 0.1 * waited > 100
    assert answer["wait_ms"]["simulated"] == pytest.approx(waited, rel=0.01)
    assert answer["latency_ms"]["simulated"] == pytest.approx(answer["latency_ms"]["measured"], rel=0.01)
    sums = sum(other["wait_ms"] for other in answer["others"]) + answer["wait_ms"]["residual"]
    assert sums == pytest.approx(answer["wait_ms"]["simulated"] - answer["wait_ms"]["alone"], abs=0.1)
    people = {seq.id: person for seq, person in zip(run.sequences, inferences())}
    people.pop(worst["id"])
    served("dynamic", list(people.values()))  # as the real server would have
    seq = people[asked.id].sequence
    assert seq.scheduled_at is not None
    assert waited - 1000 * (seq.scheduled_at - seq.arrived_at) == pytest.approx(worst["wait_ms"], rel=0.01)


@pytest.mark.parametrize(("done", "kind"), [("later", "unavailable_error"), ("never", "not_found_error")])
def test_nothing_is_said_of_a_request_before_all_beside_it_have_left(done: str, kind: str) -> None:
    people = inferences(40)
    run = served("dynamic", people)
    recording = Recording(clock=lambda: run.ended)
    last = run.iterations[-1].left[0][0]
    run.iterations.pop()  # the last to leave is still running
    watch(recording, run, people)
    beside = next(p.id for p in people if p.id != last and p.sequence.finished_at > by_id(people, last).arrived_at)
    with pytest.raises(InferenceError) as caught:
        Here(Server(manager("dynamic"), recording), 1024).blame(beside if done == "later" else last)
    assert caught.value.kind == kind


def by_id(people: list[Any], id: str) -> Any:
    return next(person.sequence for person in people if person.id == id)


HOOKS = {
    "order": "return iter([waiting.missing])",
    "release": "return running",  # of which one has not all its tokens
    "admit": "return None",
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_fails_in_the_simulation_is_reported_with_its_line(tmp_path: Path, hook: str) -> None:
    path = tmp_path / "mine.py"
    arguments = ", ".join(inspect.signature(getattr(Policy, hook)).parameters)
    path.write_text(
        f"from scheduling import policy\nclass Policy(policy.Policy):\n    def {hook}({arguments}): {HOOKS[hook]}\n"
    )
    assert f"{hook}() of mine.py, line 3" in here("dynamic")[0].answer_of([str(path)])["problem"]


def test_too_little_to_simulate_names_the_remedy() -> None:
    recording, _, server = recorded("static", people=inferences(3))
    with pytest.raises(InferenceError, match=r"3 finished requests.*Send a load first") as caught:
        Here(Server(server, recording), 1024).answer(["dynamic"], 200)
    assert caught.value.kind == "not_found_error"


def test_what_another_policy_served_is_not_told_of_the_one_it_was_switched_to() -> None:
    recording, _, server = recorded("static")
    one = Here(Server(server, recording), 1024)
    server.policy_name = "dynamic"
    with pytest.raises(InferenceError, match="0 finished requests of this policy"):
        one.answer(["nobatch"], 200)


def one_at(at: float, alone: bool) -> Served:
    return Served("", at, 1, 1, 0.1, "", 0, None, False, 1, alone, [])


def test_the_latest_requests_begin_after_the_last_pause() -> None:
    first = [one_at(k, alone=k == 0) for k in range(6)]
    second = [one_at(20 + 0.1 * k, alone=k == 0) for k in range(9)]
    assert latest([*first, *second], 200) == second
    assert latest([*first, *second], 5) == second
    assert latest(second[1:], 5) == second[-5:]  # where the server was idle is not recorded
    assert latest([*first, *second[:2]], 200) == [*first, *second[:2]]  # two requests are too few


def process(code: str, timeout: float = 120.0) -> WhatIf:
    recording, _, server = recorded("dynamic")
    return WhatIf(Server(server, recording), 1024, command=(sys.executable, "-c", code), timeout=timeout)


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("raise SystemExit(3)", "unavailable_error"),
        ("import sys; [print('{\"problem\": \"ValueError: no\"}') for line in sys.stdin if 'ask' in line]", "invalid_request_error"),
        ("import sys; [print('{\"problem\": \"UnknownWorkload: no\"}') for line in sys.stdin if 'ask' in line]", "not_found_error"),
        ("import sys; [print('{\"problem\": \"KeyError: 1\"}') for line in sys.stdin if 'ask' in line]", "server_error"),
    ],
)  # fmt: skip
def test_a_simulation_that_fails_is_reported(code: str, kind: str) -> None:
    one = process(code.replace("')", "', flush=True)"))
    for _ in range(2):  # the next question starts another process
        with pytest.raises(InferenceError) as caught:
            one.answer(["static"], 200)
        assert caught.value.kind == kind


@pytest.mark.process
def test_the_blame_for_a_request_is_simulated_once() -> None:
    code = "import sys; [print(7, flush=True) for line in sys.stdin if 'ask' in line]"
    recording, run, server = recorded("dynamic")
    one = WhatIf(Server(server, recording), 1024, command=(sys.executable, "-c", code))
    id = run.sequences[5].id
    assert one.blame(id) == b"7\n"
    one._process._command = ("false",)
    assert one.blame(id) == b"7\n"


@pytest.mark.process
def test_one_question_is_answered_at_a_time_and_in_bounded_time() -> None:
    one = process("import sys; sys.stdin.read()")
    kinds: list[str] = []

    def ask() -> None:
        with pytest.raises(InferenceError) as caught:
            one.answer(["static"], 200)
        kinds.append(caught.value.kind)

    first = threading.Thread(target=ask)
    first.start()
    wait_until(lambda: one._process.process is not None)
    ask()
    one.stop()
    first.join(SOON)
    assert kinds == ["overloaded", "unavailable_error"]
    slow = process("import sys; sys.stdin.read()", timeout=0.01)
    with pytest.raises(InferenceError) as caught:
        slow.answer(["static"], 200)
    assert caught.value.kind == "timeout_error"
    assert slow._process.process is None
