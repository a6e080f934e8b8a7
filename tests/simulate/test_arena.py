"""The arena: pairs of runs on the same requests, their intervals, and the order that comes of them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import policies
from costs.published import Constant
from scheduling.sequence import Sequence
from simulate.arena import arena
from simulate.arena.arena import Paired, Rules, never_best, paired, play, rank
from simulate.arena.measures import Measures, measure
from simulate.simulator import simulate
from tests.support import ROOT
from tests.support.scheduling import make_scheduler
from tests.support.simulate import run_command

SECOND = Constant(a=1.0, b=0.0)  # each step takes a second


def test_the_figures_of_a_run_are_those_worked_out_by_hand() -> None:
    # One slot: r0 runs from 0 to 2, r1 from 2 to 6 and r2 from 6 to 7.
    sequences = [
        Sequence([0], 2, id="r0", client="a", deadline=2.0),
        Sequence([0], 4, id="r1", client="a", deadline=5.0),
        Sequence([0], 1, id="r2", client="b", arrived_at=1.0, deadline=9.0),
    ]
    found = measure(simulate(make_scheduler("nobatch", 1), sequences, SECOND))
    assert found.mean == pytest.approx((2 + 6 + 6) / 3)
    assert found.p99 == pytest.approx(6)
    assert found.light == pytest.approx(6 / ((1 + 3 + 6) / 3))  # b asks for 2 of the 10 tokens, and waits 6 s
    assert found.misses == pytest.approx(1 / 3)


def test_a_refused_request_counts_as_answered_at_the_end() -> None:
    sequences = [Sequence([0], 3, id=str(i), client="a", deadline=9.0) for i in range(2)]
    found = measure(simulate(make_scheduler("dynamic+rpm", 2, limit=1), sequences, SECOND))
    assert (found.mean, found.misses) == (3.0, 0.5)


def test_the_percentile_is_that_of_numpy() -> None:
    run = simulate(make_scheduler("nobatch", 1), [Sequence([0], n % 7 + 1, id=str(n)) for n in range(57)], SECOND)
    assert measure(run).p99 == pytest.approx(np.percentile(run.latency, 99))


def test_an_interval_is_that_of_other_seeds_of_the_same_workloads() -> None:
    mean, half = paired([[1.0, 3.0], [10.0, 14.0]])
    assert mean == 7.0
    # Variances 2 and 8 of two values each: the error is sqrt(2 / 2 + 8 / 2) / 2, and Student's t with 2 degrees is 4.303.
    assert half == pytest.approx(4.3027 * math.sqrt(5) / 2, rel=1e-4)
    assert paired([[1.0], [3.0]]) == Paired(2.0, None)


def test_the_intervals_hold_as_often_as_they_claim() -> None:
    rng = np.random.default_rng(5)
    held = 0
    for _ in range(400):
        mean, half = paired(rng.normal([[0.0], [3.0], [-3.0]], [[1.0], [0.2], [2.0]], (3, 5)).tolist())
        assert half is not None
        held += abs(mean) <= half
    assert 370 <= held <= 400  # 95 % of 400 is 380; workloads that vary more than others make it no smaller


def test_a_policy_is_ranked_by_its_pairs_and_not_by_its_mean() -> None:
    rounds = {
        ("a", 0): {"dynamic": Measures(1.0, 1.0, 1.0, 0.5), "x": Measures(0.5, 1.0, 1.0, 0.2)},
        ("b", 0): {"dynamic": Measures(100.0, 1.0, 1.0, 0.5), "x": Measures(110.0, 1.0, 1.0, 0.2)},
    }
    best, reference = rank(rounds, "mean")
    assert (best.policy, reference.policy) == ("x", "dynamic")
    assert best.mean.mean > reference.mean.mean
    assert best.beside["mean"].mean == pytest.approx(math.log(0.5 * 1.1) / 2)
    assert best.beside["misses"].mean == pytest.approx(-0.3)


def test_a_policy_that_is_best_nowhere_is_named_and_one_that_ties_is_not() -> None:
    rounds = {
        ("a", seed): {
            "dynamic": Measures(2.0, 1.0, 1.0, 0.5),
            "tied": Measures(3.0, 1.0, 1.0, 0.5),  # with the p99 of dynamic
            "fast": Measures(1.0 + seed, 9.0, 9.0, 0.9),  # in the mean of its seeds
            "slow": Measures(2.0, 1.1, 1.1, 0.6),
        }
        for seed in range(2)
    }
    assert never_best(rounds) == ["slow"]
    rounds["b", 0] = {name: found._replace(p99=5.0) for name, found in rounds["a", 0].items()}
    assert never_best(rounds) == []


def test_every_loop_and_every_order_is_in_the_arena_once() -> None:
    names = arena.everyone()
    by_program = {
        "plas",
        "atlas",
        "justitia",
        "program-fcfs",
        "program-gittins",
        "program-srpt",
        "vtc-plas",
        "program-admission",
        "concur",
    }
    left_out = {"fcfs", *by_program}  # its workloads have no programs
    assert len(names) == len(set(names)) == len({*policies.names(), *policies.order_names()} - left_out)


def test_a_round_is_the_same_again_and_alone() -> None:
    rules = Rules(num=60)
    together, _ = play(["dynamic", "static", "dynamic+vtc"], rules, "short-long", 1)
    alone, _ = play(["static"], rules, "short-long", 1)
    assert alone["static"] == together["static"]
    assert together["static"].mean > together["dynamic"].mean


FILE = '"""Mine."""\n\nfrom policies.orders import sjf\n\n\nclass Policy(sjf.Order):\n    pass\n'


@pytest.mark.full
def test_a_file_of_ones_own_is_ranked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(FILE)
    argv = ["arena", str(mine), "--only", "--workloads", "short-long", "--seeds", "2", "--num", "300", "--jobs", "1"]
    result, words = run_command(capsys, *argv)
    assert result["runs"] == 4
    assert [s["policy"] for s in result["ranking"]] == [str(mine), "dynamic"]
    assert result["ranking"][0]["beside"]["mean"]["mean"] < 0
    assert "processor time" in words


@pytest.mark.full
def test_two_processes_give_what_one_gives(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["arena", "static", "--only", "--workloads", "uniform", "orca", "--seeds", "2", "--num", "50", "--jobs"]
    assert run_command(capsys, *argv, "1")[0]["ranking"] == run_command(capsys, *argv, "2")[0]["ranking"]


def test_a_policy_that_fails_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(FILE.replace("    pass", "    def key(self, seq, now):\n        return seq.lenght"))
    _, words = run_command(
        capsys, "arena", str(bad), "--only", "--workloads", "orca", "--num", "20", "--jobs", "1", code=1
    )
    assert "bad.py, line 8" in words
    assert "Traceback" not in words


def test_the_documented_ranking_has_every_policy_once() -> None:
    rows = [
        line.split("|")
        for line in (ROOT / "docs/results/arena.md").read_text("utf-8").splitlines()
        if line.startswith("| ")
    ]
    assert sorted(row[2].strip(" `") for row in rows[1:]) == sorted(arena.everyone())
