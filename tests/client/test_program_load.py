"""Programs from the client: a closed loop in which calls wait for answers, the same trees as in the simulator, and their figures."""

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from client import client, compare
from client.data import Call, Chat, Planned
from client.report import plots_requests, store
from client.report import programs as figures
from client.report.album import Album
from client.report.measure import Outcome
from client.runs import Pace
from client.send.dialects import Dialect
from client.send.load import LoadRun
from client.send.target import Target
from client.workloads import agentic, catalog, corpus, programs
from client.workloads.arrivals import Arrivals
from simulate import workloads
from tests.support.mock_server import MockServer

BURST = Arrivals("burst")
PACE = Arrivals("poisson", 0.5)
TEXT = corpus.load()
OURS = (200, {"data": [{"id": "bard", "owned_by": "effective-batching"}]})
# A plan, two calls with a tool on its conversation, and a call that joins them and goes on with the second.
DIAMOND = [Call((), 0.0, None, 4, 3), Call((0,), 0.02, 0, 4, 9), Call((0,), 0.01, 0, 4, 3), Call((1, 2), 0.0, 2, 4, 3)]


def plan(*trees: list[Call]) -> list[Planned]:
    """Return programs that begin at once, and whose calls say their own index."""
    calls = programs.joined((0.0, tree) for tree in trees)
    return [Planned(i, 0.0, f"call {i}", c.answer, chat=Chat(True), call=c) for i, c in enumerate(calls)]


def served(
    server: MockServer,
    planned: list[Planned],
    users: int | None = None,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> dict[int, Outcome]:
    target = Target(server.url, dialect=Dialect("chat", stream=True, counts=True))
    run = LoadRun(target, planned, users, on_outcome=on_outcome)
    run.start()
    assert run.wait(60)
    run.close()
    return {outcome.index: outcome for outcome in run.outcomes()}


@pytest.mark.parametrize("users", [None, 1])
def test_a_call_is_sent_when_those_before_it_are_answered_and_its_tool_is_done(
    server: MockServer, users: int | None
) -> None:
    planned = plan(DIAMOND, DIAMOND)
    outcomes = served(server, planned, users)
    assert len(outcomes) == 8
    for p in planned:
        assert p.call
        for parent in p.call.after:
            assert outcomes[p.index].intended >= outcomes[parent].ended + p.call.tool_s
    if users:  # one program at a time
        assert min(outcomes[i].intended for i in range(4, 8)) >= max(outcomes[i].ended for i in range(4))


def test_a_prompt_is_the_conversation_that_the_call_goes_on_with(server: MockServer) -> None:
    served(server, plan(DIAMOND))
    said = {body["messages"][-1]["content"]: body["messages"] for body in server.asked}
    root, branch, join = said["call 0"], said["call 2"], said["call 3"]
    assert branch[:-1] == [*root, {"role": "assistant", "content": " x x x"}]
    assert join[:-1] == [*branch, {"role": "assistant", "content": " x x x"}]


def test_a_failed_call_ends_its_program_and_no_other(server: MockServer) -> None:
    server.cut_after = 5  # only the longest call of the first program has so many chunks
    planned = plan(DIAMOND, [call._replace(answer=3) for call in DIAMOND])
    outcomes = served(server, planned)
    assert sorted(outcomes) == [0, 1, 2, 4, 5, 6, 7]
    assert [index for index, outcome in outcomes.items() if outcome.error] == [1]
    found, each = figures.of([*outcomes.values()], {"program-0": (4, None), "program-1": (4, None)})
    assert found
    assert (found["completed"], found["failed"], found["calls"]) == (1, 1, 7)
    assert [one["took_s"] is None for one in sorted(each, key=lambda one: str(one["program"]))] == [True, False]


def test_no_call_of_a_program_is_sent_after_one_failed(server: MockServer) -> None:
    failed = threading.Event()
    names = {"call 1": (400, {"error": {"message": "full"}})}
    server.answer = lambda body: names.get(body["messages"][-1]["content"])
    server.holds = lambda body: body["messages"][-1]["content"] == "call 2" and not failed.is_set()
    tree = [DIAMOND[0], DIAMOND[1], DIAMOND[2], Call((2,), 0.0, 2, 4, 3)]
    outcomes = served(server, plan(tree), on_outcome=lambda outcome: failed.set() if outcome.error else None)
    assert {index: outcome.error for index, outcome in outcomes.items()} == {0: "", 1: "HTTP 400", 2: ""}


def test_a_stopped_run_waits_for_no_tool(server: MockServer) -> None:
    answered = threading.Event()
    target = Target(server.url, dialect=Dialect("chat", stream=True, counts=True))
    tree = [DIAMOND[0], Call((0,), 3600.0, 0, 4, 3)]
    run = LoadRun(target, plan(tree), on_outcome=lambda outcome: answered.set())
    run.start()
    assert answered.wait(60)
    run.stop()
    assert run.wait(60)
    assert [outcome.index for outcome in run.outcomes()] == [0]
    run.close()


def test_only_servers_that_take_them_get_more_fields_than_openais(server: MockServer) -> None:
    planned = plan([Call((), 0.0, None, 4, 3, keep_s=4.0)])[0]
    more = {"program": "program-0", "session": "program-0.0", "keep_s": 4.0, "ignore_eos": True}
    bodies = [Dialect("chat", counts=counts).body(planned) for counts in (True, False)]
    assert {name: bodies[0].get(name) for name in more} == more
    assert not bodies[1].keys() & more.keys()
    assert bodies[1]["max_tokens"] == 3
    served(server, [planned])
    ((session, program),) = server.sessions
    assert (session.rpartition("-")[0], program.rpartition("-")[0]) == ("program-0.0", "program-0")


def test_a_second_run_does_not_go_on_with_the_programs_of_the_first(server: MockServer) -> None:
    for _ in range(2):
        served(server, plan(DIAMOND))
    first, second = ({program for _, program in server.sessions[i : i + 4]} for i in (0, 4))
    assert len(first) == len(second) == 1
    assert first != second


@pytest.mark.parametrize("name", ["a\nb", "\u65e5\u672c", "s" * 300, "'\"\\"])
def test_a_name_of_a_trace_fits_a_header(server: MockServer, name: str) -> None:
    call = plan([DIAMOND[0]])[0].call
    assert call
    planned = Planned(0, 0.0, "call 0", 3, chat=Chat(True), call=call._replace(session=name, program=name))
    assert served(server, [planned])[0].error == ""
    ((session, program),) = server.sessions
    assert session == program
    assert len(session) <= 256
    assert session.isascii()


@pytest.mark.parametrize("spec", programs.KINDS)
def test_the_trees_are_those_of_the_simulator(spec: str) -> None:
    planned = catalog.draw(spec, 12, PACE, 7, TEXT, context=1_000_000).planned
    simulated = workloads.draw(spec, 0.5, 12, 7)
    assert [p.call for p in planned] == simulated.calls
    own = [p.call.fresh + (0 if p.call.on is not None else 128) for p in planned if p.call]
    assert [len(p.prompt.split()) for p in planned] == own


def test_a_program_that_exceeds_the_context_is_left_out_as_a_whole() -> None:
    drawn = catalog.draw("map-reduce", 40, BURST, 3, TEXT)
    whole = catalog.draw("map-reduce", 40, BURST, 3, TEXT, context=1_000_000).planned
    kept = {p.program for p in drawn.planned}
    assert 0 < len(kept) < 40
    assert f"{40 - len(kept)} of 40" in drawn.notes[0]
    assert [p.prompt.split()[-1] for p in drawn.planned]
    assert [p.num_tokens for p in drawn.planned] == [p.num_tokens for p in whole if p.program in kept]
    for p in drawn.planned:
        assert p.call
        assert all(drawn.planned[parent].program == p.program for parent in p.call.after)
    with pytest.raises(ValueError, match="no program fits"):
        catalog.draw("map-reduce", 4, BURST, 3, TEXT, context=100)


def test_a_saved_trace_of_programs_is_sent_in_a_closed_loop(tmp_path: Path) -> None:
    rows = workloads.draw("agents", 2.0, 9, 1)
    assert rows.calls
    file = tmp_path / "agents.jsonl"
    file.write_text("".join(agentic.lines(rows.calls, rows.ids or [], 512)))
    calls = [
        p.call
        for p in catalog.draw(f"trace:{file}", None, Arrivals("trace", 1.0), 1, TEXT, 1_000_000).planned
        if p.call
    ]
    assert [(c.after, c.answer, c.session) for c in calls] == [(c.after, c.answer, c.session) for c in rows.calls]
    assert [c.tool_s for c in calls] == pytest.approx([c.tool_s for c in rows.calls])


@pytest.mark.parametrize("number", [1, 2])
def test_the_first_programs_of_a_trace_are_whole(tmp_path: Path, number: int) -> None:
    rows = [
        {"request_id": "a", "timestamp": 0}, {"request_id": "c", "timestamp": 9}, {"request_id": "b", "wait_for": ["a"]},
    ]  # fmt: skip
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps({**row, "input_length": 9, "output_length": 2}) for row in rows))
    sent = catalog.draw(f"trace:{file}", number, Arrivals("trace", 1.0), 1, TEXT).planned
    assert [p.program for p in sent] == ["program-0", "program-0", "program-1"][: number + 1]
    simulated = workloads.read(file).first(number).calls or []
    assert [call.program for call in simulated] == [p.program for p in sent]


def test_the_slowdown_is_over_the_longest_path_alone() -> None:
    pace = Pace(first=1.0, prompt=0.5, token=0.1)
    calls = programs.joined([(0.0, DIAMOND)])
    alone = [pace.alone(call) for call in calls]  # 3.2 s, 3.8 s, 3.2 s, 3.2 s
    paths = programs.longest_paths(calls, alone)
    assert paths == {"program-0": pytest.approx(3.2 + 0.02 + 3.8 + 3.2)}
    found = figures.figures({"a": 4.0, "b": 6.0}, {"a": 2.0, "b": 6.0, "c": 1.0}, 5)
    assert (found["mean_s"], found["mean_slowdown"], found["failed"]) == (5, 1.5, 1)
    assert found["jain_slowdown"] == pytest.approx(3**2 / (2 * (2**2 + 1)))
    assert "mean_slowdown" not in figures.figures({"a": 4.0}, {"a": None}, 1)


def test_a_run_counts_programs_and_prints_their_table(
    server: MockServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server.models = OURS
    table = tmp_path / "requests.csv"
    flags = ["--workload", "thought-tree:2:1", "--numsamples", "3", "--burst", "--seed", "3", "--csv", str(table)]
    assert client.main([server.url, *flags], {}) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    assert (result["programs"]["completed"], result["programs"]["calls"]) == (3, 15)
    assert len(result["program_times"]) == 3
    assert all(one["took_s"] > 0 and one["alone_s"] > 0 for one in result["program_times"])
    assert "programs in a closed loop; slow: slowdown" in captured.err
    with table.open() as file:
        assert {row["program"] for row in csv.DictReader(file)} == {"program-0", "program-1", "program-2"}


def test_a_comparison_has_the_times_of_programs(
    server: MockServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "SIMULATOR", Path("not here"))
    flags = ["--workload", "thought-tree:2:1", "--numsamples", "3", "--seed", "3", "--load", "burst", "--name", "x"]
    assert compare.main([f"a={server.url}", f"b={server.url}", *flags, "--no-plots", "--out", str(tmp_path)], {}) == 0
    rows = list(csv.DictReader((tmp_path / "x/programs.csv").read_text().splitlines()))
    assert [(row["policy"], row["load"], row["calls"]) for row in rows] == [(name, "burst", "5") for name in "aaabbb"]
    assert "programs in a closed loop" in (tmp_path / "x/table.md").read_text()
    album = Album(store.read(tmp_path / "x"))
    plots_requests.program_times(album, "burst")
    assert [picture.name for picture in album.pictures] == ["program-times.burst"]
    assert "n = 6 programs" in (tmp_path / "x/plots/program-times.burst.svg").read_text()
