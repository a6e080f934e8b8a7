"""The shadow: another policy on the requests that were served, equal to the simulation of that trace by hand."""

from __future__ import annotations

import inspect
import io
import json
import logging
import os
import sys
import threading
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import policies
from config import Config, ConfigError
from costs.cost import Affine, Host
from costs.steps import decoding, step_of, step_of_members
from launch.preflight import check_shadow
from observe.replay.question import Server as Described
from observe.replay.recording import MAX_AGE, MAX_REQUESTS, MAX_STRETCHES, STEPS_PER_SIZE, Recording
from observe.replay.shadow import MINIMUM, Shadow
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.hook_limit import limited
from simulate.measured import observed, observed_law
from simulate.measured import shadow as simulated
from simulate.scenario import Chosen, Engine, Scenario
from simulate.simulator import Run, simulate
from simulate.trace import Seen, Trace
from tests.support import wait_until
from tests.support.observe import COST, SLOTS, answer_to, inferences, manager, recorded, served, watch
from tests.support.scheduling import drive, make_scheduler, requests
from tests.support.servers import Server


def watched(policy: str = "dynamic", cost: str = "", **options: Any) -> tuple[Shadow, Run]:
    recording, run, server = recorded(policy)
    shadow = Shadow("static", Described(server, recording, cost=cost), clock=lambda: run.ended, **options)
    return shadow, run


def ask(shadow: Shadow) -> dict[str, Any]:
    """Return the answer of the process's code, called here."""
    requests = shadow._server.recording.window().requests
    return answer_to(shadow._server.question(requests, shadow=[shadow.policy, {}]), simulated.answer_from)


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


def test_the_shadow_is_exactly_the_simulation_of_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"cost": {"kind": "affine", **COST.__dict__}}))
    shadow, run = watched(cost=str(path))
    told = ask(shadow)
    for policy, of in (("static", told), ("dynamic", told["served-simulated"])):
        again = [
            Sequence([0] * len(s.prompt_ids), len(s.output_ids), arrived_at=s.arrived_at, hashes=s.hashes)
            for s in run.sequences
        ]
        made = policies.get_policy(policy, SLOTS)
        offline = simulate(Scheduler(made, PagePool(2000, 16), 256), again, COST)
        assert of["latency-p50"] == np.percentile(offline.latency, 50)
        assert of["latency-p99"] == np.percentile(offline.latency, 99)
        assert of["latency-per-token"] == (offline.latency / offline.tokens).mean()
    assert told["requests"] == len(run.sequences)
    assert told["real"]["latency-p99"] == np.percentile(run.latency, 99)
    assert max(map(abs, told["error"].values())) < 1e-9
    assert told["latency-p50"] > told["real"]["latency-p50"]
    assert told["cost"] == {"from": "cost.json"}
    assert told["intervals"] == {}  # the file has no errors of its fit


def test_constrained_requests_take_their_masks_with_them_into_the_simulation() -> None:
    people = inferences()
    for one in people[::3]:
        one.sequence.constrained = True
    planned: list[int] = []

    class Noting(Affine):
        def __call__(self, plan: Plan) -> float:
            planned.append(step_of(plan).masks)
            return super().__call__(plan)

    run = served("dynamic", people, Noting(**{**COST.__dict__, "mask_row_s": 0.004}))
    recording = Recording(clock=lambda: run.ended)
    watch(recording, run, people)
    prompts = {one.id: len(one.sequence.prompt_ids) for one in people[::3]}
    assert [step_of_members(record.members, False, prompts).masks for record in run.iterations] == planned
    told = ask(Shadow("static", Described(manager("dynamic"), recording), clock=lambda: run.ended))
    assert max(map(abs, told["error"].values())) < 0.03
    assert [one.constrained for one in recording.window().requests] == [s.constrained for s in run.sequences]


@pytest.mark.parametrize("policy", ["dynamic", "static"])
def test_a_fit_to_the_steps_predicts_the_served_policy_within_3_percent(policy: str) -> None:
    told = ask(watched(policy)[0])
    assert max(map(abs, told["error"].values())) < 0.03
    assert told["cost"]["mean_error"] < 0.03
    assert told["cost"]["from"] == "steps of this server"
    for name in ("makespan", "latency-mean", "latency-p99"):
        low, high = told["intervals"][name]
        assert low <= told[name] <= high
        assert low < high


def test_the_shadow_reports_when_it_extrapolates() -> None:
    assert ask(watched("nobatch")[0])["extrapolates"]
    assert not ask(watched("dynamic")[0])["extrapolates"]


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
    requests, from_idle = recording.window()
    assert [one.at for one in requests] == [s.arrived_at for s in run.sequences[:40]]
    assert from_idle


def test_the_memory_of_a_recording_is_bounded() -> None:
    recording = Recording(clock=lambda: 500 + MAX_AGE)
    run = served("dynamic", inferences(1))
    for k in range(3 * MAX_REQUESTS):
        (one,) = inferences(1)
        one.sequence.arrived_at, one.sequence.finished_at = k * 0.2, k * 0.2 + 0.1
        one.sequence.output_ids, one.sequence.finish_reason = [1], "length"
        recording.on_arrival(one)
        recording.observe(run.iterations[0], [one])
    requests, _ = recording.window()
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
    assert recording.window().requests == []  # it came while the other policy decided


def answers(shadow: Shadow, look: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """Start it and wait for its first word."""
    told: list[dict[str, Any]] = []

    def tell(report: dict[str, Any]) -> None:
        look()
        told.append(report)

    shadow.start(tell)
    try:
        wait_until(lambda: told)
    finally:
        shadow.stop()
    return told


@pytest.mark.process
def test_a_process_of_the_lowest_priority_simulates() -> None:
    shadow, run = watched(interval=0.01)
    kinds: list[int] = []

    def look() -> None:
        assert shadow.process.process is not None
        kinds.append(os.getpriority(os.PRIO_PROCESS, shadow.process.process.pid))

    (told, *_) = answers(shadow, look)
    assert told["state"] == "ready"
    assert kinds[0] == 19  # it takes what nobody else wants
    assert told["policy"] == "static"
    assert told["served"] == "dynamic"
    assert told["requests"] == len(run.sequences)
    assert told == shadow.report()


@pytest.mark.process
@pytest.mark.parametrize("code", ["raise SystemExit(3)", "print('no json', flush=True); input(); input()"])
def test_a_crash_is_logged_once_and_ends_the_shadow(code: str, caplog: pytest.LogCaptureFixture) -> None:
    before = threading.active_count()
    shadow, _ = watched(interval=0.01, command=(sys.executable, "-c", code))
    with caplog.at_level(logging.WARNING):
        (told,) = answers(shadow)
    assert told["state"] == "failed"
    assert told["reason"]
    assert len(caplog.records) == 1
    wait_until(lambda: threading.active_count() <= before)


def test_an_unreadable_record_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    recording = Recording()
    for _ in range(3):
        recording.observe(SimpleNamespace(), [])  # type: ignore[arg-type]
    assert len(caplog.records) == 1


def test_a_recording_that_stopped_keeps_no_more_arrivals() -> None:
    recording, (before, after) = Recording(), inferences(2)
    recording.on_arrival(before)
    assert recording.oldest_open() == before.sequence.arrived_at
    recording.observe(SimpleNamespace(), [])  # type: ignore[arg-type]
    recording.on_arrival(after)
    assert recording.oldest_open() == float("inf")


def test_an_embedding_is_simulated_as_an_answer_of_one_token() -> None:
    def seen(tokens: int) -> list[tuple[Any, ...]]:
        people = inferences()
        for one in people[::2]:
            one.sequence.max_tokens = tokens
        run = served("dynamic", people)
        recording = Recording(clock=lambda: run.ended)
        watch(recording, run, people)
        return [(one.at, one.prompt, one.tokens, one.latency) for one in recording.arrived()]

    assert seen(0) == seen(1)
    assert len(seen(0)) == 120


def test_a_failing_policy_is_reported_without_a_crash() -> None:
    shadow, _ = watched()
    shadow.policy = "no-such"
    assert "unknown policy 'no-such'" in ask(shadow)["problem"]


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
    shadow, _ = watched()
    shadow.policy = str(path)
    assert f"{hook}() of mine.py, line 3" in ask(shadow)["problem"]


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


def test_incomplete_requests_are_load_but_not_in_the_figures() -> None:
    trace = Trace([Seen(0.0, 5, 30, None), Seen(0.0, 5, 10, 1.0), Seen(0.5, 5, 10, 1.0)])
    nobatch = Chosen("nobatch")
    run = Scenario((nobatch,), Engine(8), Affine(base=0.1), Host(), trace).serve(nobatch)
    assert len(run.done) == 3
    assert simulated.figures_of(run, trace)["latency-p50"] > 3.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shadow_cost": "x.json"}, "--shadow is not set"),
        ({"shadow": "statik"}, "Did you mean 'static'"),
        ({"shadow": "static", "shadow_cost": "none.json"}, "simulate calibrate"),
    ],
)
def test_settings_that_cannot_work_are_rejected(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_shadow(Config(**settings))
    assert issubclass(ConfigError, ValueError)


def state_of(server: Server) -> dict[str, Any]:
    """Return the first event of the live page's feed."""
    url = f"http://127.0.0.1:{server.port}/events?detail=1"
    with urllib.request.urlopen(url, timeout=60) as reply:
        while True:
            line = reply.readline()
            if line.startswith(b"data: "):
                state: dict[str, Any] = json.loads(line[6:])
                return state


@pytest.mark.full
@pytest.mark.process
def test_a_server_reports_how_the_other_policy_would_have_served(tmp_path: Path) -> None:
    flags = ("--model", "mock:llm-mock@20", "--max-batch-size", "8", "--shadow", "static")
    with Server(tmp_path / "log", "dynamic", *flags) as server:
        assert server.get("/stats").json["shadow"]["state"] == "waiting"
        server.burst([{"prompt": "hi", "num_tokens": 3 + 5 * k % 40} for k in range(3 * MINIMUM)])
        wait_until(lambda: server.get("/stats").json["shadow"]["state"] == "ready")
        told = server.get("/stats").json["shadow"]
        assert (told["policy"], told["served"]) == ("static", "dynamic")
        assert MINIMUM <= told["requests"] <= 3 * MINIMUM
        assert told["latency-p99"] > 0
        assert told["real"]["latency-p99"] > 0
        assert state_of(server)["shadow"]["requests"] >= told["requests"]
