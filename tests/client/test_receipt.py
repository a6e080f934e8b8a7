"""The receipt of an experiment: what counts, and that it does not lie, on the simulator's clock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from client.report import receipt
from client.report.receipt import FEWEST, GOAL, KEEP_A, SAME, TAKE_B, TELLING, TOO_FEW, UNKNOWN, Request, Window
from dev.benchmarks.receipts import CASES, experiment
from tests.support import sample

ORDER = "ABBAABBAABBAABBAABBA"
NAMES = {"arms": {"A": "static", "B": "dynamic"}, "ended": ""}


def windows(order: str = ORDER, seconds: float = 10.0) -> list[Window]:
    return [Window(arm, i * seconds, (i + 1) * seconds) for i, arm in enumerate(order)]


def steady(b: float = 1.0, order: str = ORDER, client: str = "") -> list[Request]:
    """Return a request a second that takes about a second under A, and `b` as long under B."""
    rng = np.random.default_rng(1)
    rows = []
    for i in range(10 * len(order)):
        took = (b if order[i // 10] == "B" else 1.0) * float(rng.uniform(0.9, 1.1))
        rows.append(Request(str(i), i + 0.0, i + took / 2, i + took, 10, client or f"c{i % 2}"))
    return rows


def of(requests: Sequence[Request], order: str = ORDER, planned: int | None = None, **more: Any) -> dict[str, Any]:
    now = 10.0 * len(order)
    return receipt.receipt(requests, windows(order), now, planned or len(order) // 2, **more)


@pytest.mark.parametrize(("b", "verdict"), [(1.0, SAME), (0.8, TAKE_B), (1.2, KEEP_A)])
def test_what_is_better_is_told_with_its_interval(b: float, verdict: str) -> None:
    found = of(steady(b))
    assert found["verdict"] == verdict
    goal = found["figures"][GOAL]
    assert goal["low"] < b - 1 < goal["high"]
    assert goal["change"] == pytest.approx(b - 1, abs=0.03)
    assert found["figures"]["TTFT mean"]["change"] == pytest.approx(b - 1, abs=0.03)
    assert found["figures"]["E2E p99"]["change"] == pytest.approx(b - 1, abs=0.05)
    assert found["figures"]["tokens/s"]["change"] == pytest.approx(1 / b - 1, abs=0.05)
    assert (found["pairs"], found["void"], found["unfinished"]) == (10, {}, 0)


def test_goodput_is_the_share_within_all_limits() -> None:
    """Those who fail are not, nor are those who have waited for too long, ended or not."""
    rows = [
        Request("fast", 0.0, 0.1, 1.0, 10), Request("late", 0.0, 0.6, 1.0, 10), Request("slow", 0.0, 0.1, 3.0, 10),
        Request("failed", 0.0, None, 0.1, 0, failed=True), Request("waits", 0.0, None, None, 0),
    ]  # fmt: skip
    share = receipt.goodput({"ttft": 500.0, "e2el": 2000.0})["goodput"]
    assert [sum(share(one, now)[0] for one in rows) for now in (0.4, 9.0)] == [2, 1]
    tpot = receipt.goodput({"tpot": 101.0})["goodput"]
    assert [tpot(one, 9.0) for one in rows[:3]] == [(True, 1), (True, 1), (False, 1)]
    assert receipt.goodput({}) == {}


def test_goodput_is_measured_and_predicted_where_there_are_limits() -> None:
    limits, rows = {"e2el": 1000.0}, steady(1.5)
    before = receipt.predicted(steady(), rows, 0.0, limits)
    assert before["goodput"]["change"] == pytest.approx(-0.5, abs=0.1)
    found = of(rows, before=before, limits=limits)
    goodput = found["figures"]["goodput"]
    assert (goodput["a"], goodput["b"]) == (pytest.approx(0.5, abs=0.1), 0.0)
    assert goodput["predicted"] == before["goodput"]
    assert goodput["high"] < 0
    assert of(steady(), limits={"e2el": 1.0})["figures"]["goodput"]["change"] == 0  # of none to none


def test_a_request_belongs_to_the_window_in_which_it_arrived() -> None:
    """One that goes on under B is A's, and B's requests count from its end."""
    one = Request("1", 9.0, 9.5, 12.0, 10)
    two = [Request(str(i), i + 0.0, i + 0.5, i + 0.5, 10) for i in (10, 11, 12, 13)]
    (((a, b),), void) = receipt.pairs_of([one, *two], windows("AB"), 20.0)
    assert (a, [r.id for r in b], void) == ([one], ["12", "13"], {})


def test_who_has_not_ended_counts_with_what_it_has_waited() -> None:
    one, two = Request("1", 5.0, None, None, 0), Request("2", 6.0, 7.0, None, 3)
    assert [receipt.latency(r, 15.0) for r in (one, two)] == [10.0, 9.0]
    assert [receipt.first_token(r, 15.0) for r in (one, two)] == [10.0, 1.0]
    assert receipt.first_token(Request("3", 5.0, None, 8.0, 0), 15.0) == 3.0


def test_a_wash_out_without_an_end_is_said() -> None:
    endless = [Request(f"long {i}", 10.0 * i + 9, None, 10.0 * i + 19, 10) for i in range(20)]
    found = of([*steady(1.2), *endless])
    assert found["verdict"] == UNKNOWN
    assert found["void"]["washed"] > 10
    assert "of 20 windows earlier requests were too slow to leave" in receipt.lines_of(found | NAMES)[-1][0]


def test_windows_without_requests_do_not_count_and_too_little_traffic_is_said() -> None:
    found = of([one for one in steady() if one.at < 35], ORDER[:6], planned=10)
    assert (found["pairs"], found["done"], found["void"]) == (2, 3, {"empty": 2} if ORDER else {})
    assert found["needed_s"] is None
    assert "too little traffic: 2 of 3 pairs count; in 2 of 6 windows no request arrived" in receipt.need(found)
    assert "in 2 of 6 windows no request arrived" in receipt.lines_of(found | NAMES)[-1][0]
    noisy = [one._replace(end=one.end + 20 * (i % 7 == 0) * (i % 3)) for i, one in enumerate(steady()) if one.end]
    found = of([one._replace(end=min(one.end or 0, one.at + 4)) for one in noisy], ORDER[:6], planned=3)
    assert found["needed_s"] > 60
    assert "too little traffic: use --minutes" in receipt.need(found)
    assert "too little" not in receipt.need(of(steady(), ORDER[:6], planned=10))
    assert of([])["verdict"] == UNKNOWN


def test_who_is_refused_does_not_look_fast() -> None:
    refused = [
        one._replace(end=one.at, failed=True) if ORDER[i // 10] == "B" and i % 5 == 0 else one
        for i, one in enumerate(steady())
    ]
    found = of(refused)
    assert found["figures"][GOAL]["high"] < 0
    assert found["verdict"] == KEEP_A
    assert (found["figures"]["failed"]["a"], found["figures"]["failed"]["b"]) == (0.0, pytest.approx(1 / 6))


@pytest.mark.parametrize("took", [0.0, 1.0, 2.0])
@pytest.mark.parametrize(("fails", "verdict", "result"), [("A", TAKE_B, "won"), ("B", KEEP_A, "lost")])
def test_the_side_that_fails_more_wins_neither_in_all_nor_for_a_client(
    fails: str, verdict: str, result: str, took: float
) -> None:
    """Whether requests are refused at once, or given up after as long as an answer takes, or twice as long."""
    rows = [
        one._replace(end=one.at + took, failed=True) if ORDER[i // 10] == fails and i % 5 < 2 else one
        for i, one in enumerate(steady(client="ann"))
    ]
    found = of(rows)
    assert (found["verdict"], found["clients"][0]["result"]) == (verdict, result)
    if took:
        return
    few = [one if i % 50 == 1 else one._replace(failed=False) for i, one in enumerate(rows)]
    assert of(few)["verdict"] == SAME  # as it may be chance


def test_a_client_that_no_pair_has_on_both_sides_is_shown_without_figures() -> None:
    rows = [*steady(client="ann"), Request("1", 15.0, 15.1, 15.2, 3, "ben")]
    ann, ben = receipt.lines_of(of(rows) | NAMES)[-3:-1]
    assert (ann[0], ben) == ("ann", ["ben", "-", "-", "- (too few)", TOO_FEW])


def test_who_won_and_who_lost() -> None:
    rows = [
        one if one.client == "c0" or ORDER[i // 10] == "A" else one._replace(end=one.at + 2)
        for i, one in enumerate(steady())
    ]
    told = {one["client"]: one["result"] for one in of(rows)["clients"]}
    assert told == {"c0": SAME, "c1": "lost"}


def test_answers_of_another_length_are_no_effect() -> None:
    """B's windows happen to have answers that are twice as long."""
    rng = np.random.default_rng(2)
    rows = []
    for i in range(200):
        tokens = int(rng.integers(10, 100) * (1 + (ORDER[i // 10] == "B")))
        rows.append(Request(str(i), float(i), i + 0.1, i + 0.1 + tokens * 0.02, tokens))
    assert abs(of(rows)["figures"][GOAL]["change"]) < 0.01


def by_latency(one: Request, now: float) -> tuple[float, float]:
    return receipt.latency(one, now), 1


def single(rows: Any) -> list[receipt.Pair]:
    """Return pairs of windows with a request each, which takes as long as these columns say."""
    return [([Request("a", 0.0, None, a, 1)], [Request("b", 0.0, None, b, 1)]) for a, b in rows]


def test_the_looks_spend_no_more_than_there_is() -> None:
    for planned in (1, 3, 7, 10, 40):
        looks = sorted(set(receipt.looks_of(planned)))
        assert looks[-1] == planned
        assert sum(receipt.alpha_of(done, planned) for done in looks) <= receipt.ALPHA + 1e-12


@pytest.mark.parametrize("count", [5, 9, 14, 15, 30])
def test_an_interval_misses_no_more_often_than_it_may(count: int) -> None:
    """Whatever the pairs are like: here their noise differs a hundredfold."""
    rng, misses, runs = np.random.default_rng(count), 0, sample(1000)
    for _ in range(runs):
        level, noise = rng.uniform(1, 100, (count, 1)), rng.normal(0, 0.1, (count, 2))
        found = receipt.change(receipt.pooled(single(level * (1 + noise)), by_latency, 0.0), count, 0.1)
        misses += not found["low"] <= 0 <= found["high"]
    assert misses <= 0.1 * runs + 3 * math.sqrt(0.09 * runs)


def test_few_pairs_tell_nothing() -> None:
    found = receipt.change(receipt.pooled(single([[1.0, 2.0]] * 4), by_latency, 0.0), 4, 0.05)
    assert (found["low"], found["high"], found["enough"]) == (-1.0, math.inf, False)
    assert found["change"] == 1.0


@pytest.mark.parametrize(("pairs", "verdict"), [(1, TOO_FEW), (TELLING - 1, TOO_FEW), (TELLING, TAKE_B)])
def test_what_too_few_pairs_show_is_no_verdict_and_holds_no_prediction(pairs: int, verdict: str) -> None:
    before = {GOAL: {"change": -0.2, "low": -0.3, "high": -0.1}}
    found = of(steady(0.8, ORDER[: 2 * pairs]), ORDER[: 2 * pairs], before=before)
    assert found["verdict"] == verdict
    assert {one["result"] for one in found["clients"]} == {TOO_FEW}  # they need more, as they are two
    assert found["figures"][GOAL].get("held") == (None if verdict == TOO_FEW else True)
    assert (found["needed_s"] is None) == (pairs < FEWEST)
    assert pairs < FEWEST or found["needed_s"] >= 20 * TELLING


def test_figures_are_over_all_requests_of_a_side() -> None:
    """Of windows with few requests and windows with many, and of latencies that most windows do not have."""
    rows = [one._replace(end=one.at + 5.0) if i % 40 == 7 else one for i, one in enumerate(steady(0.8))]
    rows += [Request(f"burst {i}", 22.0, 26.0, 27.0, 10) for i in range(100)]
    found, (pairs, _) = of(rows, limits={"e2el": 1500.0}), receipt.pairs_of(rows, windows(), 200.0)
    for side, times in zip("ab", ([receipt.latency(one, 0) for pair in pairs for one in pair[k]] for k in (0, 1))):
        figures = {name: one[side] for name, one in found["figures"].items()}
        assert figures["goodput"] == pytest.approx(np.mean(np.array(times) <= 1.5))
        assert figures["E2E p99"] == pytest.approx(np.percentile(times, 99, method="higher"))
        assert figures[GOAL] == pytest.approx(np.mean(times))  # all answers have the same length


@pytest.mark.parametrize(("low", "high", "held"), [(-0.1, 0.1, True), (0.29, 0.31, False), (0.1, 0.22, True)])
def test_a_prediction_holds_what_was_measured_within_both_intervals(low: float, high: float, held: bool) -> None:
    before = {"change": (low + high) / 2, "low": low, "high": high}
    found = of(steady(), before={GOAL: before})["figures"][GOAL]
    measured = {"change": 0.0, "low": -0.16, "high": 0.16}
    assert receipt.holds(before, measured) == held
    assert found["held"] == receipt.holds(before, found)


def test_a_prediction_is_about_the_same_requests() -> None:
    a = [Request(str(i), float(i), None, i + 1.0 + i % 3, 10) for i in range(120)]
    b = [one._replace(end=one.at + 0.9 * ((one.end or 0) - one.at)) for one in a]
    found = receipt.predicted(a, b, 0.0)[GOAL]
    assert found["change"] == pytest.approx(-0.1)
    assert found["low"] == pytest.approx(-0.11)
    assert receipt.predicted(a, b, 0.2)[GOAL]["high"] == pytest.approx(0.1)


@pytest.mark.parametrize("case", ["A/A, load 0.5", "A/A, drift", "A/A, burst"])
def test_without_an_effect_there_is_none(case: str) -> None:
    found = Counter(experiment(seed, **CASES[case], pairs=8)["verdict"] for seed in range(6))
    assert found[SAME] >= 5


@pytest.mark.parametrize("effect", [0.1, -0.1])
def test_a_planted_effect_is_found(effect: float) -> None:
    found = Counter(experiment(seed, pairs=8, effect=effect)["verdict"] for seed in range(4))
    assert found[KEEP_A if effect > 0 else TAKE_B] >= 3


def test_what_was_predicted_of_a_real_switch_is_measured() -> None:
    arms = {"A": "static", "B": "dynamic"}
    found = [experiment(seed, load=0.4, pairs=8, arms=arms) for seed in range(3)]
    assert [one["verdict"] for one in found] == [TAKE_B] * 3
    assert sum(one["figures"][GOAL]["held"] for one in found) >= 2
