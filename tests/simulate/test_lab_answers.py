"""What the lab's page asks: races, verdicts, and what is wrong with a policy, by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulate.arena import lab
from simulate.arena.grade import grade
from simulate.simulator import simulate
from tests.support.scheduling import make_scheduler

OWN = '''"""Shortest first."""

from scheduling import policy


class Policy(policy.Policy):
    def order(self, waiting, now):
        return sorted(waiting, key=lambda seq: seq.max_tokens)
'''
ASKED = {"policies": ["my_policy.py"], "text": OWN, "workload": "few", "count": 30, "rate": 10, "slots": 2, "seed": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a workload in which the order matters."""
    (tmp_path / "workloads").mkdir()
    rows = [[i / 2, 8 + i, 1 + 7 * i % 40, "ab"[i % 2], i % 3, 5.0] for i in range(40)]
    (tmp_path / "workloads" / "few.json").write_text(json.dumps([rows]))
    return tmp_path


def ask(folder: Path, kind: str = "race", **changes: Any) -> Any:
    return json.loads(lab.answer(json.dumps({"kind": kind, **ASKED, **changes}), str(folder)))


def test_a_race_has_the_figures_and_the_steps_of_the_simulator(folder: Path) -> None:
    answer = ask(folder, policies=["dynamic", "my_policy.py", "dynamic+sjf"])
    asked = ASKED | {"policies": ["dynamic"]}
    run = simulate(make_scheduler("dynamic", 2, budget=2048), lab.arrivals(asked, folder), lab.COST, records=True)
    fcfs, mine, sjf = answer["lanes"]
    assert (fcfs["steps"], fcfs["makespan"]) == (run.steps, run.makespan)
    assert fcfs["latency"] == run.latency.tolist()
    assert sum(record["repeat"] for record in fcfs["records"]) == run.steps
    assert ask(folder, "records", policies=["dynamic"]) == json.loads(json.dumps([i.to_dict() for i in run.iterations]))
    assert mine["latency"] == sjf["latency"] != fcfs["latency"]
    assert answer["cut_s"] is None


def test_a_policy_has_the_options_that_it_is_given(folder: Path) -> None:
    def latency(gamma: float) -> Any:
        options = {"dynamic+boost": {"gamma": gamma}}
        return ask(folder, policies=["dynamic+boost", "dynamic"], options=options)["lanes"][0]["latency"]

    fcfs, sjf = (ask(folder, policies=[name])["lanes"][0]["latency"] for name in ("dynamic", "my_policy.py"))
    assert latency(1e6) == fcfs
    assert sum(sjf) <= sum(latency(0.001)) < sum(latency(1.0)) < sum(fcfs)
    wrong = ask(folder, policies=["dynamic+boost"], options={"dynamic+boost": {"gamma": -1}})
    assert "gamma is -1" in wrong["error"]["words"]


def test_a_lane_of_many_steps_is_cut_but_its_figures_are_of_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ask(folder, policies=["dynamic", "static"])
    monkeypatch.setattr(lab, "MOST_STEPS", 50)
    cut = ask(folder, policies=["dynamic", "static"])
    assert 0 < cut["cut_s"] < whole["lanes"][0]["makespan"]
    for before, after in zip(whole["lanes"], cut["lanes"]):
        assert all(record["t"] < cut["cut_s"] for record in after.pop("records"))
        before.pop("records")
        assert before == after


def test_a_file_with_an_order_is_an_order_of_dynamic(folder: Path) -> None:
    text = OWN.replace("class Policy", "class Order")
    assert ask(folder, text=text)["lanes"][0]["latency"] == ask(folder)["lanes"][0]["latency"]


def test_the_laws_are_those_of_the_command(folder: Path) -> None:
    assert ask(folder, "laws", cases=20, large=0)["kept"] is True
    lazy = OWN.replace("seq.max_tokens)", "seq.max_tokens)[1:]")
    verdict = ask(folder, "laws", text=lazy, cases=100, large=0)
    assert verdict["kept"] is False
    assert "the smallest case" in verdict["words"]
    assert str(folder) not in verdict["words"]


def test_a_grade_is_that_of_the_command(folder: Path) -> None:
    graded = ask(folder, "grade", lesson="sjf", cases=5, large=0)
    assert graded["kept"] is True
    score = grade("dynamic+sjf", "sjf", cases=5, large=0).score
    assert score is not None
    assert graded["words"].startswith(f"{score:.0f} of 100 points")
    lazy = OWN.replace("seq.max_tokens)", "seq.max_tokens)[1:]")
    refused = ask(folder, "grade", text=lazy, lesson="sjf", cases=50, large=0)
    assert refused["kept"] is False
    assert refused["words"].startswith("my_policy.py breaks a law")


@pytest.mark.parametrize("kind", ["race", "laws", "grade"])
def test_the_page_hears_in_a_browser_that_steps_go_on(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[int, bytes]] = []
    with monkeypatch.context() as patch:
        patch.setattr(lab, "TELL_EVERY", -1)
        patch.setattr(lab.sys, "platform", "emscripten")
        patch.setattr(lab.os, "write", lambda *line: heard.append(line))
        ask(folder, kind, lesson="sjf", cases=2, large=0)
    assert len(heard) > 10
    assert set(heard) == {(2, b"alive\n")}


HOOK = "\n    def {name}(self, *of):\n        return {value}\n"
WRONG = {
    "no Python": ("class Policy(\n", 1, "never closed"),
    "no class": ("x = 1\n", None, "class Policy"),
    "the clock": ("x = 1\nimport time\n", 2, "import time"),
    "JavaScript": ("from js import fetch\n", 1, "from js"),
    "Pyodide": (OWN.replace("return", "import pyodide_js\n        return"), 8, "pyodide_js"),
    "a file": ("open('x')\n", 1, "open()"),
    "no module": ("import nothing_here\n", 1, "nothing_here"),
    "an exception": (OWN.replace("seq.max_tokens", "seq.size"), 8, "size"),
    "nothing returned": (OWN.replace("return sorted", "sorted"), 7, "order()"),
    "numbers for requests": (OWN.replace("sorted(waiting, key=lambda seq: seq.max_tokens)", "[1]"), 7, "order()"),
    "too few numbers": (OWN + HOOK.format(name="allocate_tokens", value="[]"), 10, "allocate_tokens"),
    "a word for a number": (OWN + HOOK.format(name="admit", value="'two'"), 10, "admit()"),
    "a word for a time": (OWN + HOOK.format(name="admit", value=0) + HOOK.format(name="deadline", value="'x'"), 13, "deadline()"),
    "too few arguments": (OWN.replace("waiting, now", "waiting"), 7, "def order(self, waiting, now)"),
    "waiting forever": (OWN + HOOK.format(name="admit", value=0), None, "admits no request"),
    "the end": ("raise SystemExit\n", 1, "SystemExit"),
    "too deep": ("def f(): f()\nf()\n", 1, "RecursionError"),
    "interrupted": (OWN.replace("return sorted", "raise KeyboardInterrupt\n        return sorted"), 8, "stopped"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_policy_is_said_with_its_line(folder: Path, name: str) -> None:
    text, line, words = WRONG[name]
    error = ask(folder, text=text)["error"]
    assert error["line"] == line, error
    assert words in error["words"]
    assert str(folder) not in error["words"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"rate": 0}, "rate"), ({"count": 2.5}, "count"), ({"slots": "4"}, "slots"), ({"seed": 1}, "seed"), ({"policies": []}, "policies"),
     ({"workload": "../few"}, "few"), ({"policies": ["os.path"]}, "os.path"), ({"policies": ["/etc/x.py"]}, "x.py")],
)  # fmt: skip
def test_what_a_link_asks_for_is_checked(folder: Path, changes: dict[str, Any], named: str) -> None:
    assert named in ask(folder, **changes)["error"]["words"]
