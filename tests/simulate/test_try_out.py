"""`new` and `try`: a file to start from, and all that the simulator says of it; and where the prints of hooks go."""

from __future__ import annotations

import io
import json
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

import policies
from costs.cost import Affine
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.__main__ import main
from simulate.commands import run, try_out
from simulate.measured import observed
from simulate.simulator import simulate
from tests.support.simulate import run_command

SMALL = ["--num", "40", "--max-batch-size", "4"]
LOUD = """
from scheduling import policy


class Policy(policy.Policy):
    def admit(self, waiting, running, budget, now):
        n = min(len(waiting), budget.slots)
        print(f"{now:.3f}: {n} of {len(waiting)} waiting may join {len(running)} running")
        return n
"""


@pytest.fixture
def mine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return a file whose hooks print."""
    path = tmp_path / "mine.py"
    path.write_text(LOUD)
    return path


@pytest.fixture
def written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return a file that `new` wrote."""
    path = tmp_path / "written.py"
    told, words = run_command(capsys, "new", str(path))
    assert told == {"written": str(path)}
    assert f"./eb try {path}" in words
    return path


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try few cases, and draw a page without plots."""
    monkeypatch.setattr(try_out, "QUICK", (20, 0))
    monkeypatch.setattr(try_out, "CASES", 20)
    monkeypatch.setattr(try_out, "LARGE_CASES", 0)
    monkeypatch.setattr(try_out, "ARENA", [*try_out.ARENA, "--num", "10", "--workloads", "uniform"])
    monkeypatch.setattr(run.ending, "draw_page", lambda folder, console: (folder / "report.html").write_text("plots"))


@pytest.mark.parametrize(
    "command", [["check", "--cases", "3", "--large-cases", "0"], ["run", *SMALL], ["arena", "--only", "--jobs", "1", "--num", "10", "--seeds", "1", "--workloads", "uniform"]],
    ids=lambda words: words[0],
)  # fmt: skip
def test_what_hooks_print_goes_to_stderr(command: list[str], mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command[0], str(mine), *command[1:]]) == 0
    captured = capsys.readouterr()
    assert " waiting may join " in captured.err
    assert " waiting may join " not in captured.out
    if command[0] == "check":
        assert captured.out.startswith(f"{mine} keeps every law in 3 small")
    else:
        json.loads(captured.out)


@pytest.mark.full
def test_what_hooks_print_in_another_process_goes_to_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(LOUD)
    main(["grade", "sjf", str(mine)])
    captured = capfd.readouterr()
    assert " waiting may join " in captured.err
    json.loads(captured.out)


def test_what_hooks_print_is_no_answer_to_a_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(rows: object, ask: object) -> dict[str, int]:
        print("printed")
        return {"answer": 1}

    monkeypatch.setattr("os.nice", lambda steps: 0)
    out = io.StringIO()
    observed.converse(answer, ['{"ask": {}}'], out)
    assert json.loads(out.getvalue()) == {"answer": 1}
    assert capsys.readouterr() == ("", "printed\n")


def test_a_file_is_not_overwritten(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, words = run_command(capsys, "new", str(mine), code=2)
    assert words == f"error: '{mine}' exists, and is not overwritten. Use another name\n"
    assert mine.read_text() == LOUD


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("new mine", "Use mine.py"),
        ("new tgi.py", "my_tgi.py"),
        ("new sjf.py", "my_sjf.py"),
        ("try dynamic+sjf", "is a policy of this project. Use a file, or ./eb simulate run "),
        ("try HERE", "is a folder. Name the file"),
    ],
)
def test_a_name_that_no_policy_file_can_have_is_refused(
    line: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, words = run_command(capsys, *line.replace("HERE", str(tmp_path)).split(), code=2)
    assert remedy in words


@pytest.mark.usefixtures("_quick")
def test_a_file_to_start_from_keeps_the_laws_prints_nothing_and_leaves_no_state_behind(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told, words = run_command(capsys, "try", str(written), *SMALL)
    assert told["good"]
    assert "note: " not in words
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {written.name}
    policy = policies.get_policy(str(written), 2)
    simulate(Scheduler(policy), [Sequence([1], n, id=str(n)) for n in range(1, 9)], Affine(base=1.0))
    assert policy.length == {}


@pytest.mark.usefixtures("_quick")
def test_the_verdict_is_the_last_line_and_promises_no_more_than_the_laws(
    mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(try_out, "report", None)  # plots and ranks only where that is asked for
    mine.write_text(
        f"{LOUD}\n    def order(self, waiting, now):\n        return sorted(waiting, key=lambda seq: seq.max_tokens)\n"
    )
    told, words = run_command(capsys, "try", str(mine), *SMALL)
    dynamic, own = told["runs"]
    change = own["mean_e2el_ms"] / dynamic["mean_e2el_ms"] - 1
    last = words.splitlines()[-1]
    assert last.startswith(f"mine loses no request; beside dynamic: latency {change:+.0%}, p99 ")
    assert len(last) <= 80
    assert "starve" not in words
    assert "not claimed:" in words
    (note,) = [line for line in words.splitlines() if line.startswith("note: what hooks printed is in ")]
    assert all(" waiting may join " in line for line in Path(note.rpartition(" ")[2]).read_text().splitlines())


def test_what_a_hook_printed_before_it_failed_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out" / "printed.txt"
    with suppress(ZeroDivisionError), try_out.printed(path, Console(stderr=True)):
        print("before")
        raise ZeroDivisionError
    assert path.read_text() == "before\n"


@pytest.mark.usefixtures("_quick")
def test_a_report_has_plots_lower_bounds_and_a_ranking(
    mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    told, words = run_command(capsys, "try", str(mine), *SMALL, "--out", str(out))
    assert (told["policy"], told["base"], told["good"]) == ("mine", "dynamic", True)
    assert [each["policy"] for each in told["runs"]] == ["dynamic", "mine"]
    assert all(each["simulation"]["least_mean_e2el_ms"] > 0 for each in told["runs"])
    assert {each["policy"] for each in told["arena"]} == {"dynamic", str(mine)}
    assert told["report"] == str(out / "report.html")
    assert words.splitlines()[-1].startswith("mine loses no request; beside dynamic: latency ")
    assert all(" waiting may join " in line for line in (out / "printed.txt").read_text().splitlines())
    assert f"what hooks printed is in {out / 'printed.txt'}" in words
    assert " waiting may join " not in words


@pytest.mark.usefixtures("_quick")
def test_a_broken_law_ends_the_trial_with_the_smallest_case_and_what_is_printed_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "careless.py"
    path.write_text(LOUD.replace("return n", "return n + 1"))
    told, words = run_command(capsys, "try", str(path), code=1)
    assert not told["good"]
    assert "runs" not in told
    assert " waiting may join " in words.partition("breaks a law (slots)")[0]
    assert "the smallest case found that shows it" in words


def test_an_order_is_tried_under_dynamic_and_a_loop_beside_its_own(tmp_path: Path) -> None:
    order, loop = tmp_path / "late.py", tmp_path / "hurry.py"
    order.write_text("from scheduling.policy import Policy\n\n\nclass Order(Policy):\n    pass\n")
    loop.write_text("from policies import prefill_first\n\n\nclass Policy(prefill_first.Policy):\n    pass\n")
    assert policies.complete(str(order)) == f"dynamic+{order}"
    assert policies.complete(str(loop)) == str(loop)
    assert policies.complete("dynamic+sjf") == "dynamic+sjf"
    names = {"dynamic": f"dynamic+{order}", "prefill-first": str(loop), "tgi": f"tgi+{order}"}
    assert {base: try_out.base_of(policies.get_policy(name)) for base, name in names.items()} == {b: b for b in names}
