"""Which requests made others wait: cases worked out by hand, and the same runs without the worst culprit."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

import policies
from costs.cost import Affine, Host
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate import workloads
from simulate.__main__ import main
from simulate.best import blame
from simulate.simulator import simulate

Again = Callable[[], tuple[Scheduler, list[Sequence]]]
COST = Affine(base=0.02, row=0.002, prefill=0.01, token=0.0004)


def served(policy: str, slots: int, *requests: tuple[float, int, str]) -> Again:
    """Return what makes a scheduler and requests anew: when each arrives, its tokens, and its client."""

    def again() -> tuple[Scheduler, list[Sequence]]:
        sequences = [
            Sequence([0], tokens, id=str(i), arrived_at=at, client=client)
            for i, (at, tokens, client) in enumerate(requests)
        ]
        return Scheduler(policies.get_policy(policy, slots)), sequences

    return again


def drawn(policy: str, count: int = 24, rate: float = 5.0) -> Again:
    rows = workloads.draw("clipped-normal", rate, count, 3).hinted(3, 3, 0, ())
    return lambda: (Scheduler(policies.get_policy(policy, 4), None, 64), rows.sequences())


def test_with_one_slot_a_request_waits_because_of_those_before_it_in_its_busy_period() -> None:
    # The steps take 1 s: the first runs from 0 to 10, the second to 15, the third to 18; the others come later.
    again = served("nobatch", 1, (0, 10, "a"), (4, 5, "b"), (6, 3, "a"), (30, 2, "b"), (31, 4, "a"))
    found = blame.of(again, Affine(base=1.0), Host())
    assert found.took[:, 0].tolist() == [0, 6, 9, 0, 1]
    # Without the first, the second would run from 4 to 9, and the third wait 3 s; without the second, it would wait 4 s.
    by = np.zeros((5, 5))
    by[1, 0], by[2, 0], by[2, 1], by[4, 3] = 6, 6, 5, 1
    assert found.by[:, :, 0].tolist() == by.tolist()
    assert found.residual[:, 0].tolist() == [0, 0, 9 - 6 - 5, 0, 0]
    assert not found.by[:, :, 1].any()
    matrix = found.by_client()
    assert matrix["clients"] == ["a", "b"]
    assert matrix["requests"] == [3, 2]
    assert matrix["wait_ms"]["by"] == [[pytest.approx(2000), pytest.approx(2000)], [3000, 0]]
    assert matrix["wait_ms"]["residual"] == [pytest.approx(-2000 / 3, abs=0.001), 0]


def test_a_request_that_had_left_before_another_arrived_is_not_to_blame_for_it() -> None:
    found = blame.of(served("nobatch", 1, (0, 2, ""), (1, 2, ""), (3, 2, "")), Affine(base=1.0), Host())
    assert found.by[2, :, 0].tolist() == [0, 1, 0]
    assert found.residual[2].tolist() == [0, 0]


def test_in_a_batch_others_take_a_slot_and_slow_the_tokens() -> None:
    # A step takes 1 s and 1 s per row. The third joins when the first leaves, at 12; it runs two steps beside the second.
    again = served("dynamic", 2, (0, 4, "a"), (0, 6, "b"), (1, 3, "c"))
    found = blame.of(again, Affine(base=1.0, row=1.0), Host(), "2")
    assert found.took.tolist() == [[11, 8]]
    assert found.alone.tolist() == [[0, 6]]
    # Without either of them, it would join after the first step, at 2, and run all its three steps beside the other.
    assert sorted(seq.id for seq in found.culprits) == ["0", "1"]
    assert found.by.tolist() == [[[10, -1], [10, -1]]]
    told = found.of_request(["x", "y", "z"])
    assert told["wait_ms"] == {"simulated": 11000, "alone": 0, "residual": -9000, "residual_share": -9 / 11}
    assert told["run_ms"] == {"simulated": 8000, "alone": 6000, "residual": 4000, "residual_share": 2}
    assert {(one["id"], one["client"], one["wait_ms"], one["run_ms"]) for one in told["others"]} == {
        ("x", "a", 10000, -1000), ("y", "b", 10000, -1000),
    }  # fmt: skip


@pytest.mark.parametrize(("rate", "replays"), [(1000.0, 24 + 24), (5.0, None)])
def test_a_run_that_is_known_is_not_simulated_again_and_the_blame_is_the_same(rate: float, replays: int | None) -> None:
    again, made = drawn("dynamic", rate=rate), []

    def counted() -> tuple[Scheduler, list[Sequence]]:
        made.append(again())
        return made[-1]

    known = blame.of(counted, COST, Host(), run=simulate(*again(), COST))
    assert replays in (None, len(made))  # all arrive at once: without each of them, and each of them alone
    found = blame.of(again, COST, Host())
    assert np.array_equal(known.by, found.by)
    assert np.array_equal(known.residual, found.residual)


@pytest.mark.parametrize("policy", ["nobatch", "static", "dynamic", "chunked", "dynamic+sjf"])
def test_without_the_worst_culprit_a_request_waits_as_much_less_as_was_said(policy: str) -> None:
    again, cost = drawn(policy), COST
    scheduler, everyone = again()
    waits = {seq.id: times(seq) for seq in simulate(scheduler, everyone, cost).done}
    asked = max(waits, key=lambda id: waits[id][0])
    told = blame.of(again, cost, Host(), asked).of_request([str(i) for i in range(24)])
    worst = max(told["others"], key=lambda other: other["wait_ms"])
    assert worst["wait_ms"] > 0
    scheduler, everyone = again()
    left = simulate(scheduler, [seq for seq in everyone if seq.id != worst["id"]], cost)
    (after,) = (times(seq) for seq in left.done if seq.id == asked)
    said = [worst["wait_ms"] / 1000, worst["run_ms"] / 1000]
    assert waits[asked] - after == pytest.approx(said, abs=1e-6)
    for k, part in enumerate(blame.PARTS):
        parts = told[part]
        rest = sum(other[part] for other in told["others"]) + parts["residual"]
        assert parts["simulated"] == pytest.approx(1000 * waits[asked][k], abs=0.001)
        assert parts["simulated"] - parts["alone"] == pytest.approx(rest, abs=0.1)


def times(seq: Sequence) -> np.ndarray:
    assert seq.scheduled_at is not None
    assert seq.finished_at is not None
    return np.array([seq.scheduled_at - seq.arrived_at, seq.finished_at - seq.scheduled_at])


def test_the_blame_for_one_request_is_its_row_of_the_matrix_and_leaves_out_those_least_together_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again = drawn("dynamic")
    left_out: list[int] = []
    every = blame.of(again, COST, Host(), progress=left_out.append)
    assert left_out == [*range(1, len(every.culprits) + 1)]
    monkeypatch.setattr(blame, "MOST_OTHERS", 7)
    one = blame.of(again, COST, Host(), "15")
    row = [seq.id for seq in every.victims].index("15")
    columns = {seq.id: k for k, seq in enumerate(every.culprits)}
    assert one.took[0].tolist() == every.took[row].tolist()
    assert one.by[0].tolist() == [every.by[row, columns[seq.id]].tolist() for seq in one.culprits]
    assert len(one.culprits) == 7
    assert one.left_out > 0
    monkeypatch.setattr(blame, "MOST_REPLAYED", 4 * 24)  # each run has at most 24 requests
    assert len(blame.of(again, COST, Host(), "15").culprits) in range(4, 8)


def test_the_clients_with_the_fewest_requests_share_a_row_and_a_column() -> None:
    requests = [(float(i % 5), 3, f"c{min(i, 19 - i)}") for i in range(19)]
    found = blame.of(served("nobatch", 1, *requests), Affine(base=1.0), Host())
    matrix = found.by_client()
    assert len(matrix["clients"]) == blame.MOST_CLIENTS + 1
    assert sum(matrix["requests"]) == 19
    for part in blame.PARTS:
        sums = np.array(matrix[part]["alone"]) + np.sum(matrix[part]["by"], axis=1) + matrix[part]["residual"]
        assert sums == pytest.approx(np.array(matrix[part]["simulated"]), abs=0.05)


def test_nobody_is_to_blame_for_a_request_that_is_not_answered() -> None:
    with pytest.raises(ValueError):
        blame.of(served("nobatch", 1, (0, 2, "")), Affine(base=1.0), Host(), "7")


def test_a_run_has_a_matrix_of_its_clients_whose_rows_sum_to_the_measured_waits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--num", "30", "--rate", "6", "--max-batch-size", "4", "--clients", "2", "--blame"]
    assert main(["run", "dynamic", *flags]) == 0
    out = capsys.readouterr()
    figures = json.loads(out.out)["runs"][0]["simulation"]
    found = figures["blame"]
    assert "client-1" in out.err
    assert found["clients"] == ["client-1", "client-2"]
    wait = np.average(found["wait_ms"]["simulated"], weights=found["requests"])
    assert wait == pytest.approx(figures["mean_queue_ms"], abs=0.01)
    for part in blame.PARTS:
        sums = np.array(found[part]["alone"]) + np.sum(found[part]["by"], axis=1) + found[part]["residual"]
        assert sums == pytest.approx(np.array(found[part]["simulated"]), abs=0.05)
    assert main(["run", "dynamic", "--num", "401", "--blame"]) == 2
