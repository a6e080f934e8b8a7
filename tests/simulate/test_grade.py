"""Grades: laws first, then the distance from the best known; whatever a file does, the answer is a sentence."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from simulate.arena.grade import grade
from simulate.arena.lessons import COST, LESSONS
from simulate.arena.measures import measure
from simulate.best import regret
from simulate.commands.grade import grade_apart
from simulate.simulator import simulate
from tests.support import ROOT
from tests.support.simulate import run_command

FEW: dict[str, int] = {"cases": 8, "large": 0}
HEAD = "from scheduling import policy\n\n\nclass Policy(policy.Policy):\n"
ORDER = HEAD + "    def order(self, waiting, now):\n        "

BAD = {
    "syntax": ("from scheduling import policy\n\nclass Policy(policy.Policy)\n    pass\n", "line 3", "expected ':'"),
    "clock": ("import time\n" + HEAD + "    pass\n", "line 1", "time"),
    "javascript": ("import js\n" + HEAD + "    pass\n", "line 1", "js"),
    "machine": ("import sys\n" + HEAD + "    pass\n", "line 1", "sys"),
    "its judge": ("from simulate.arena.arena import measures\n" + HEAD + "    pass\n", "line 1", "simulate"),
    "eval": (ORDER + "return eval('waiting')\n", "line 6", "eval"),
    "no class": ("x = 1\n", "Policy", "class"),
    "error on import": (HEAD + "    limit = 1 / 0\n", "line 5", "ZeroDivisionError"),
    "bytes": ("\0", "null", "bad.py"),
    "None": (ORDER + "list(waiting)\n", "line 5", "returns nothing"),
    "ids": (ORDER + "return [seq.id for seq in waiting]\n", "line 5", "'r0'"),
    "generator": (ORDER + "yield 3\n", "line 5", "returned 3"),
    "half": (HEAD + "    def admit(self, waiting, running, budget, now):\n        return 0.5\n", "line 5", "0.5"),
    "words": (HEAD + "    def blocked_by(self, seq, running, budget):\n        return 'no'\n", "line 5", "slots_full"),
    "arguments": (HEAD + "    def on_token(self, seq):\n        pass\n", "line 5", "def on_token(self, seq, now)"),
    "misspelled": (HEAD + "    def ordr(self, waiting, now):\n        return waiting\n", "line 5", "order()"),
    "typing error": (ORDER + "return sorted(waiting, key=lambda seq: seq.max_token)\n", "line 6", "max_token"),
    "never admits": (
        HEAD + "    def admit(self, waiting, running, budget, now):\n        return 0\n",
        "bad.py",
        "wait",
    ),
    "forgets": (ORDER + "return list(waiting)[:0]\n", "bad.py", "law"),
}


def written(folder: Path, text: str) -> str:
    path = folder / "bad.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_gets_line_and_reason(kind: str, tmp_path: Path) -> None:
    text, *words = BAD[kind]
    found = grade(written(tmp_path, text), "sjf", **FEW)
    assert found.score is None
    for word in words:
        assert word in found.problem
    assert "Traceback" not in found.problem


@pytest.mark.parametrize(
    "body",
    ["return sum(iter(int, 1))\n", pytest.param("while now >= 0:\n            now += 1\n", marks=pytest.mark.full)],
)
def test_an_endless_loop_is_stopped_also_in_c(body: str, tmp_path: Path) -> None:
    found = grade_apart(written(tmp_path, ORDER + body), "sjf", 0, limit=0.3)
    assert "order() of bad.py, line 6," in found.problem
    assert found.score is None


@pytest.mark.full
def test_a_policy_that_leaves_the_process_gets_a_sentence(tmp_path: Path) -> None:
    found = grade_apart(written(tmp_path, ORDER + "raise SystemExit(0)\n"), "sjf", 0)
    assert "SystemExit" in found.problem


def test_the_command_answers_a_bad_file_with_status_1_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, BAD["syntax"][0])
    table = tmp_path / "grades.csv"
    result, words = run_command(capsys, "grade", "sjf", file, "--csv", str(table), code=1)
    assert "line 3" in words
    assert "Traceback" not in words
    row = next(csv.DictReader(table.read_text().splitlines()))
    assert (row["policy"], row["score"], row["lesson"]) == (file, "", "sjf")
    assert row["problem"] == result["grades"][0]["problem"]


@pytest.mark.parametrize(
    "lesson", [pytest.param(name, marks=() if name == "fair" else pytest.mark.full) for name in LESSONS]
)
def test_first_come_first_served_scores_0_and_the_best_known_100(lesson: str) -> None:
    task = LESSONS[lesson]
    scores = {name: grade(name, lesson, **FEW).score for name in (task.base, *task.best)}
    assert scores[task.base] == 0
    assert max(filter(None, scores.values())) == pytest.approx(100)


@pytest.mark.full
def test_a_grade_is_the_same_again_and_another_with_other_requests() -> None:
    first, again, other = (grade("dynamic+drr", "fair", seed, **FEW) for seed in (0, 0, 1))
    assert first == again
    assert first.figure != other.figure


@pytest.mark.parametrize(
    ("policy", "lesson", "least"),
    [("dynamic+edf", "slo", 0.0), pytest.param("dynamic+srpt", "sjf", 1.0, marks=pytest.mark.full)],
)
def test_no_policy_is_below_the_bound(policy: str, lesson: str, least: float) -> None:
    found = grade(policy, lesson, bounds=regret.of, **FEW)
    assert found.bound is not None
    assert found.figure is not None
    assert least <= found.bound <= found.figure


def test_the_figure_is_that_of_the_lessons_own_lists() -> None:
    task = LESSONS["slo"]
    runs = [simulate(task.scheduler("dynamic"), task.sequences(f"slo:4:{n}"), COST) for n in range(3)]
    assert grade("dynamic", "slo", 4, **FEW).figure == pytest.approx(sum(measure(run).misses for run in runs) / 3)


def test_grading_needs_only_the_standard_library() -> None:
    code = (
        "import sys\nfrom simulate.arena.grade import grade\nassert grade('dynamic', 'slots', cases=4, large=0).score > 99\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(result.stdout.split())
    assert "simulate" in loaded
    assert not loaded & {"client", "click", "dotenv", "matplotlib", "numpy", "rich", "scipy"}
