"""Advice on logs that the simulator made, so that the truth is known: how well other settings would have served them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import config
import policies
from costs.cost import Affine, Host, Scaled
from integrations.queue import options as queue
from integrations.queue.menu import Menu
from integrations.vllm.serve import TESTED
from integrations.vllm.serve import main as serve_vllm
from simulate.__main__ import main
from simulate.advise.changes import Change, changes_of, own_change, serve, switch_for, way_of
from simulate.advise.search import Search
from simulate.commands import advise
from simulate.engines import known
from simulate.engines.known import Kind
from simulate.fitting import fitted as fits
from simulate.fitting.fitted import Fitted
from simulate.logs.log import Log
from simulate.measured.intervals import Noise
from simulate.scenario import Chosen, EngineSize, Scenario
from simulate.trace import Seen, Trace
from tests.support.mock_server import mock_server

LAW = Affine(base=0.02, token=0.0001)
FLAGS = {"slots": "--max-num-seqs {}", "tokens_per_step": "--max-num-batched-tokens {}"}
NEWEST_FIRST = '''"""Newest first."""
from scheduling import policy


class Order(policy.Policy):
    def order(self, waiting, now):
        return reversed(list(waiting))
'''
LAZY = '''"""None ever joins."""
from scheduling import policy


class Policy(policy.Policy):
    def admit(self, waiting, running, budget, now):
        return 0
'''


def short_long(gap: float, count: int = 60, limit: int = 0) -> Trace:
    """Return requests of which each fourth has a long answer."""
    return Trace([Seen(gap * i, 100, 160 if i % 4 == 0 else 8, 0.0, limit=limit) for i in range(count)])


def log_of(trace: Trace, policy: str = "chunked", slots: int = 2, factor: float = 1.0) -> Log:
    """Return what a server would have logged whose steps take `factor` times as long as the law says."""
    run = Scenario((Chosen(policy),), EngineSize(slots), Scaled(LAW, factor), Host(), trace).serve(Chosen(policy))
    first, last = ([getattr(seq, name) for seq in run.sequences] for name in ("first_token_at", "finished_at"))
    return Log(trace, np.array(first), np.array(last))


def fitted_to(
    trace: Trace, slots: int = 2, name: str = "vllm", flags: Any = FLAGS, doubts: tuple[str, ...] = ()
) -> Fitted:
    """Return the fit of a server that the simulator imitates with `chunked`; its runs differ by some 2 %."""
    engine, noise = EngineSize(slots), Noise((0.03, -0.02, 0.0, 0.02, -0.03), 0.015, 8)
    scenario = Scenario((Chosen("chunked"),), engine, LAW, Host(), trace)
    kind = Kind(name, "vLLM", Chosen("chunked"), engine, 0, flags)
    return Fitted(scenario, noise, log_of(trace, slots=slots), kind, {}, {"ttft": 0.01, "latency": 0.01}, doubts=doubts)


def best(fitted: Fitted, *own: Change, **limits: float) -> dict[str, dict[str, Any]]:
    """Return the advice by the titles of the changes, without other loops, which take long to try."""
    search = Search(fitted, limits)
    changes = [change for change in changes_of(fitted) if "loop" not in change]
    return {each["title"]: each for each in search.best(changes, own)}


def test_what_shortest_first_would_have_done_is_within_the_interval() -> None:
    trace = short_long(0.05)
    gain = best(fitted_to(trace))["order sjf"]["gains"]["mean latency"]
    for factor in (0.98, 1.0, 1.02):
        before, after = (log_of(trace, policy, factor=factor) for policy in ("chunked", "chunked+sjf"))
        true = (after.last - after.at).mean() / (before.last - before.at).mean() - 1
        assert true < -0.35
        assert gain[1] < true < gain[2] < 0


def test_where_no_request_waits_no_difference_can_be_told() -> None:
    advice = best(fitted_to(short_long(30.0)), {"order": "lcf"}, {"loop": "prefill-first"})
    assert {"order lcf", "loop prefill-first"} <= advice.keys()
    assert all(low <= 0 <= high for each in advice.values() for _, low, high in each["gains"].values())


def test_more_rows_than_the_fit_saw_are_noted_and_cost_twice_as_much_at_the_upper_end() -> None:
    fitted = fitted_to(short_long(0.05))
    search = Search(fitted, {})
    more = search.advice({"slots": 8})
    assert "The fit saw 2 rows a step, and this has up to 8" in more["notes"]
    steep = replace(fitted, scenario=replace(fitted.scenario, cost=Affine(base=0.02, token=0.02)))
    low, high = (Search(each, {}).advice({"slots": 8})["gains"]["mean latency"] for each in (fitted, steep))
    assert high[2] - high[0] > 2 * (low[2] - low[0])


def test_a_cost_of_each_chunk_may_be_one_of_each_token() -> None:
    trace = short_long(0.05)
    fitted = fitted_to(trace)
    dear = replace(fitted, scenario=replace(fitted.scenario, cost=replace(LAW, prefill=0.02)))
    center, low, high = Search(dear, {}).advice({"tokens_per_step": 16})["gains"]["mean latency"]
    even = replace(LAW, prompt=LAW.prompt + 0.02 / 100)  # all prompts have 100 tokens
    before, after = (serve(dear, change, law=even).latency.mean() for change in ({}, {"tokens_per_step": 16}))
    assert low < after / before - 1 < center - 0.02
    assert center < high


def test_an_order_that_lets_requests_starve_is_noted_and_ranked_behind(tmp_path: Path) -> None:
    (tmp_path / "newest.py").write_text(NEWEST_FIRST)
    own = {"order": str(tmp_path / "newest.py")}
    fitted = fitted_to(Trace([Seen(0.07 * i, 20, 8, 0.0) for i in range(150)]))
    search = Search(fitted, {})
    results = search.best([{"tokens_per_step": 16}], [own])
    assert any("starve" in note for each in results if each["change"] == own for note in each["notes"])


def test_a_change_that_does_not_serve_all_requests_is_left_out_with_the_reason() -> None:
    search = Search(fitted_to(Trace([Seen(0.05 * i, 100, 80, 0.0, deadline=0.05 * i + 9) for i in range(40)])), {})
    assert not search.tried([{"order": "admission-control"}])
    assert "refused" in search.failed["order admission-control"]


def test_an_order_by_length_goes_by_the_limit_and_not_by_the_answer() -> None:
    known = [change.get("order") for change in changes_of(fitted_to(short_long(0.05)))]
    hidden = [change.get("order") for change in changes_of(fitted_to(short_long(0.05, limit=200)))]
    assert "sjf" in known
    assert "sjf" not in hidden
    fitted = fitted_to(short_long(0.05, limit=200))
    alike = [serve(fitted, change).latency.mean() for change in ({}, {"order": "sjf"})]
    assert alike[1] == pytest.approx(alike[0], rel=0.05)


def test_the_goal_is_the_share_of_requests_within_the_limits() -> None:
    fitted = fitted_to(short_long(0.05))
    found = best(fitted, ttft=2.0)["order sjf"]
    assert next(iter(found["figures"])) == "SLO met"
    run = serve(fitted, {"order": "sjf"})
    assert found["figures"]["SLO met"] == pytest.approx((run.ttft <= 2.0).mean())
    assert found["gains"]["SLO met"][1] > 0


def test_a_second_server_is_ranked_after_what_needs_none() -> None:
    titles = [*best(fitted_to(short_long(0.05)))]
    assert titles.index("replicas 2, router least-loaded") == len(titles) - 1


def test_a_foreign_server_gets_a_queue_and_this_one_a_policy() -> None:
    trace = short_long(0.05, limit=1000)
    ours = fitted_to(trace, name="ours", flags={"policy": "--policy {}", "slots": "--max-batch-size {}"})
    foreign = fitted_to(trace)
    change = {"slots": 4, "order": "sjf"}
    assert way_of(ours, change) == "--policy chunked+sjf and --max-batch-size 4"
    assert way_of(foreign, change).startswith("--max-num-seqs 4 and ./eb queue dynamic+sjf --upstream URL")
    assert not any("loop" in each for each in changes_of(fitted_to(trace, name="tgi")))
    two = replace(foreign, log=replace(foreign.log, server={"parallel": 2}))
    assert way_of(two, {"slots": 4}) == "--max-num-seqs 2"  # of each engine


def test_what_switches_a_named_policy_can_be_tested_on_live_traffic(tmp_path: Path) -> None:
    """At a server of ours, and at a queue before another."""
    (tmp_path / "mine.py").write_text(NEWEST_FIRST)
    own = str(tmp_path / "mine.py")
    ours, foreign = fitted_to(short_long(0.05), name="ours", flags={"policy": "{}"}), fitted_to(short_long(0.05))
    assert switch_for(ours, {"order": "sjf"}) == "./eb switch URL chunked chunked+sjf"
    assert switch_for(ours, {"loop": "dynamic"}) == "./eb switch URL chunked dynamic"
    assert switch_for(foreign, {"order": "sjf"}) == "./eb switch URL dynamic dynamic+sjf"
    for fitted in (ours, foreign):
        assert switch_for(fitted, {"order": own}) == switch_for(fitted, {"slots": 4}) == ""
        assert switch_for(fitted, {"replicas": 2, "router": "least-loaded"}) == ""
    assert switch_for(foreign, {"loop": "static"}) == ""


@pytest.mark.parametrize("kind", known.KINDS.values(), ids=known.names())
def test_each_printed_command_is_taken_by_the_command_that_it_names(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, started = tmp_path / "newest first.py", []
    own.write_text(NEWEST_FIRST)
    monkeypatch.setattr("integrations.vllm.serve.vllm_version", lambda: TESTED)
    monkeypatch.setattr("os.execve", lambda *command: started.append(command))
    rows = [Seen(i, 100, 8 + i % 3, 0.0, f"c{i % 3}", i % 4, 99.0, limit=i % 2, pages=(1,)) for i in range(12)]
    fitted = fitted_to(Trace(rows), name=kind.name, flags=kind.flags)
    fitted = replace(fitted, scenario=replace(fitted.scenario, policies=(kind.policy,)))
    for change in (*changes_of(fitted), own_change(str(own))):
        name, *words = shlex.split(way_of(fitted, change).partition(" (if")[0])
        if name == "./eb" and words[0] == "queue":
            Menu().get_policy(queue.parse([*words[1:-1], "http://127.0.0.1:9#4"]).config.policy)
        elif name == "./eb":
            serve_vllm(words[2:])
            assert started.pop()
        elif name == "./server.sh":
            policies.check_name(config.load(words).config.policy)
        else:  # a flag of another server, or of this one
            assert name in " ".join(kind.flags.values()) or "replicas" in change


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `advise` with a fit, whatever the log, and returns its status and what it prints."""
    monkeypatch.setattr(fits, "save", lambda path, fitted: None)

    def run(fitted: Fitted, *words: str, log: Log | None = None) -> tuple[int, str]:
        monkeypatch.setattr(fits, "load", lambda path: fitted)
        monkeypatch.setattr(advise, "read", lambda path: log)
        code = main(["advise", *(words or ["log.json"]), "--advice", str(tmp_path / "advice.json")])
        return code, capsys.readouterr().err

    return run


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_fit_in_doubt_gives_no_advice(run: Run) -> None:
    fitted = fitted_to(short_long(0.05), name="tgi", doubts=("the law explains half of the waits",))
    code, text = run(fitted)
    assert code == 1
    assert "the law explains half of the waits" in text
    assert "sjf" not in text
    code, text = run(fitted, "log.json", "--anyway")
    assert code == 0
    assert "order sjf" in text


def test_the_advice_has_what_was_measured_and_how_to_apply_each_change(run: Run, tmp_path: Path) -> None:
    code, text = run(fitted_to(short_long(0.05), name="tgi"))
    table = text[: text.index("1: ")]
    assert code == 0
    assert "as served, measured" in table
    assert max(map(len, table.splitlines()[-10:])) <= 80
    assert "./eb queue dynamic+sjf --upstream URL" in text
    assert "lower bound" in text
    test = json.loads((tmp_path / "advice.json").read_text())["test"]
    assert test.startswith("./eb switch URL dynamic dynamic+")
    assert flat(text).endswith(f"to test it on live traffic: {test}")
    assert len(json.loads((tmp_path / "advice.json").read_text())["advice"]) <= 6


def test_what_was_measured_of_a_part_of_the_requests_says_so(run: Run) -> None:
    fitted = fitted_to(short_long(0.05), name="tgi", flags={})
    half = replace(fitted, log=fitted.log.until(30))
    code, text = run(replace(half, scenario=replace(half.scenario, rows=half.log.trace)))
    assert code == 0
    assert "30 of 60" in flat(text)


def test_where_nothing_helps_the_command_says_so(run: Run) -> None:
    code, text = run(fitted_to(short_long(30.0), name="tgi"))
    assert code == 0
    assert "no change improves the mean latency" in text
    assert "live traffic" not in text


def test_a_policy_of_the_users_own_that_breaks_a_law_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "lazy.py").write_text(LAZY)
    code, text = run(fitted_to(short_long(0.05), name="tgi", flags={}), "log.json", "--policy", f"{tmp_path}/lazy.py")
    assert code == 0
    for words in ("warning: ", "order sjf", f"left out: loop {tmp_path}/lazy.py"):
        assert words in flat(text)


@pytest.mark.parametrize(
    ("factor", "policy", "code"), [(1.01, "chunked+sjf", 0), (1.0, "chunked", 1), (1.5, "chunked+sjf", 1)]
)
def test_a_newer_log_says_whether_the_advice_was_true(
    factor: float, policy: str, code: int, run: Run, tmp_path: Path
) -> None:
    fitted = fitted_to(short_long(0.05), name="tgi", flags={})
    assert run(fitted)[0] == 0
    advice = json.loads((tmp_path / "advice.json").read_text())["advice"]
    number = 1 + [each["title"] for each in advice].index("order sjf")
    later = log_of(short_long(0.06, 80), policy, factor=factor)  # another load
    found, text = run(fitted, "--check", "new.json", "--applied", str(number), log=later)
    assert found == code
    assert f"the advice was {'true' if code == 0 else 'not true'}" in text.lower()


def test_a_trace_is_served_in_place_of_the_requests_of_the_fit(run: Run) -> None:
    mine = log_of(short_long(0.5, 40))
    code, text = run(fitted_to(short_long(0.05), name="tgi"), "cost.json", "--trace", "new.json", log=mine)
    assert code == 0
    assert "40 requests" in text
    assert "measured" not in text[text.index("40 requests") : text.index("lower bound")]


@pytest.mark.parametrize("slo", ["ttft", "ttft:fast", "itl:0", "tpot:1", "ttft:0.5;itl:1"])
def test_an_slo_that_is_no_limit_is_refused(slo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "log.json", "--slo", slo]) == 2
    assert "Use seconds of ttft, itl or latency" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "remedy"), [([], "Use ./eb advise LOG"), (["http://localhost:1"], "Start it with ./server.sh")]
)
def test_a_command_line_without_requests_is_refused(
    words: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", *words]) > 0
    assert remedy in capsys.readouterr().err


def test_a_server_that_requires_a_key_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with mock_server() as server:
        server.answer = lambda body: (401, {})
        assert main(["advise", server.url]) == 2
    assert f"{server.url} requires an API key" in capsys.readouterr().err


def test_a_server_that_does_not_report_its_requests_has_to_be_probed_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(advise, "served", lambda url, api_key: None)
    assert main(["advise", "http://here", "--trace", "LOG"]) == 2
    assert "Use ./eb probe http://here, and then ./eb advise cost.json --trace LOG" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["fit", "advise"])
def test_a_log_that_cannot_be_read_leaves_no_empty_file(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log").write_bytes(b"\xff")
    assert main([command, "log"]) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
