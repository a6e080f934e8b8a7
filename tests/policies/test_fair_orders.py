"""Orders that are fair between clients: vtc, vtc-pred, lcf, drr and rpm."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.orders import _fair, _predictions, vtc
from scheduling.iteration import Plan
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from tests.support.data import path_of
from tests.support.scheduling import drive, make_scheduler, order_of_admission, requests
from tests.support.strategies import slots


def rivals(shapes: dict[str, tuple[int, int]], n: int = 40, **start: int) -> list[Sequence]:
    """Return n requests at once of each client, of its shape, from its start on."""
    return [
        Sequence([1] * prompt, output, id=f"{client}{i}", client=client, arrived_at=start.get(client, 0))
        for i in range(n)
        for client, (prompt, output) in shapes.items()
    ]


def gap(scheduler: Scheduler, sequences: list[Sequence], **weights: float) -> float:
    """Return by how much service differed most between two clients while both had somebody waiting."""
    served = {seq.client: 0.0 for seq in sequences}
    least = dict.fromkeys(served, 0.0)
    worst = 0.0
    began = False

    def planned(scheduler: Scheduler, plan: Plan) -> None:
        nonlocal worst, least, began
        both = {seq.client for seq in scheduler.waiting} == set(served)
        if both and not began:
            least = dict(served)
        began = both
        for seq in plan.joined:
            served[seq.client] += len(seq.prompt_ids) / weights.get(seq.client, 1)
        for seq, count in zip(plan.sequences, plan.counts):
            if count == seq.pending:
                served[seq.client] += 2 / weights.get(seq.client, 1)
        if both:
            since = [served[client] - least[client] for client in served]
            worst = max(worst, max(since) - min(since))

    drive(scheduler, sequences, planned=planned)
    return worst


SHAPES = {"a": (12, 2), "b": (2, 20)}


def test_clients_are_served_within_the_bound_of_the_theorem() -> None:
    bound = 2 * max(12, 2 * 4 * 22)
    fair = gap(make_scheduler("dynamic+vtc", 4), rivals(SHAPES))
    assert fair <= bound
    assert gap(make_scheduler("dynamic", 4), rivals(SHAPES)) > 2 * fair


def test_charging_ahead_with_exact_predictions_narrows_the_gap() -> None:
    shapes = {"a": (2, 10), "b": (2, 40)}
    vtc = gap(make_scheduler("dynamic+vtc", 8), rivals(shapes, 80))
    exact = gap(make_scheduler("dynamic+vtc-pred", 8, predictor="oracle"), rivals(shapes, 80))
    assert exact < vtc / 2


def test_the_larger_the_error_of_a_prediction_the_wider_the_gap() -> None:
    shapes = {"a": (2, 30), "b": (2, 90)}

    def width(name: str, **options: object) -> float:
        return gap(make_scheduler(f"dynamic+{name}", 8, **options), rivals(shapes, 80))

    widths = [width("vtc-pred", predictor="uniform", error=error) for error in (0, 0.5, 1)]
    assert widths[0] == width("vtc-pred", predictor="oracle")
    assert widths == sorted(set(widths))
    assert widths[-1] < width("vtc") / 2


def profiled(prompt: int, output: int) -> float:
    """Return the milliseconds that the paper's authors measured for such a request, by their fit."""
    return 0.21001891 * prompt + 0.10075395 * output + 0.0039868 * prompt * output + 0.00324733 * output**2 + 1.14601454


@pytest.mark.parametrize(
    ("order", "options"),
    [("vtc", {"w_p": 1, "w_q": 2}), *(("vtc-pred", {"predictor": name}) for name in ("oracle", "noisy", "uniform", "mean")),
     ("vtc", {"cost": "profile"}), ("vtc-pred", {"cost": "profile"})],
    ids=str,
)  # fmt: skip
def test_a_counter_counts_each_prompt_and_token_once_whatever_was_charged_ahead(
    order: str, options: dict[str, object]
) -> None:
    loop = make_scheduler(f"dynamic+{order}", 3, **options)
    drive(loop, rivals(SHAPES, 10))
    price = profiled if "cost" in options else lambda prompt, output: prompt + 2 * output
    wanted = {client: 10 * price(*shape) for client, shape in SHAPES.items()}
    assert loop.policy.counters == pytest.approx(wanted)  # type: ignore[attr-defined]


def test_the_profiled_cost_is_the_fit_of_the_papers_profile() -> None:
    path = path_of("vtc/cost_profile.json")
    rows = [
        (int(p), int(n), 1000 * (prefill + decode))
        for p, by_output in json.loads(path.read_text()).items()
        for n, (_, prefill, decode) in by_output.items()
    ]
    p, n, t = np.array(rows).T
    found = np.linalg.lstsq(np.stack([p, n, p * n, n * n, np.ones(len(t))], 1), t, rcond=None)[0]
    assert found == pytest.approx(vtc.PROFILE, rel=1e-6)


def test_a_profiled_cost_charges_ahead_by_the_prediction() -> None:
    loop = make_scheduler("dynamic+vtc-pred", 1, cost="profile", predictor="oracle")
    loop.add(Sequence([1] * 12, 40, client="a"))
    loop.plan(0)
    assert loop.policy.counters == pytest.approx({"a": profiled(12, 40)})  # type: ignore[attr-defined]


def test_by_profiled_cost_those_who_read_long_contexts_get_fewer_tokens() -> None:
    shapes = {"short": (10, 100), "long": (1000, 100)}

    def share_of_long(**options: object) -> float:
        sequences = rivals(shapes, 60)
        scheduler = make_scheduler("dynamic+vtc", 4, w_p=0, **options)
        first = set()

        def planned(scheduler: Scheduler, plan: Plan) -> None:
            if scheduler.number < 1500:
                first.update(plan.joined)

        drive(scheduler, sequences, planned=planned)
        return sum(seq.client == "long" for seq in first) / len(first)

    assert share_of_long() == pytest.approx(0.5, abs=0.05)
    wanted = profiled(10, 100) / (profiled(10, 100) + profiled(1000, 100))
    assert share_of_long(cost="profile") == pytest.approx(wanted, abs=0.05)


def test_the_papers_code_counts_decodes_and_all_of_them_again_when_a_request_finishes() -> None:
    loop = make_scheduler("dynamic+vtc", 3, count_twice="on")
    drive(loop, [Sequence([1] * 5, 3, client="a"), Sequence([1] * 5, 5, client="b")])
    # prompts 5 each; decodes 2 and 4; r0 ends with the 2nd decode, r1 with the 4th
    assert loop.policy.counters == {"a": 5 + 2 * 2 + 2, "b": 5 + 4 * 2 + 2 + 2}  # type: ignore[attr-defined]


def test_the_papers_code_is_one_token_behind_with_a_profiled_cost() -> None:
    loop = make_scheduler("dynamic+vtc", 3, count_twice="on", cost="profile")
    drive(loop, [Sequence([1] * 5, 3, client="a"), Sequence([1] * 5, 5, client="b")])

    def token(number: int) -> float:
        return profiled(5, number) - profiled(5, number - 1)

    # before each decode the token before it is charged, and the last one again when somebody finishes
    a = profiled(5, 0) + token(1) + token(2) + token(3)
    b = profiled(5, 0) + sum(token(k) for k in (1, 2, 3, 4)) + token(3) + token(5)
    assert loop.policy.counters == pytest.approx({"a": a, "b": b})  # type: ignore[attr-defined]


def test_a_client_of_twice_the_weight_is_served_twice() -> None:
    loop = make_scheduler("dynamic+vtc", 2, weights="a:2")
    assert gap(loop, rivals({"a": (4, 4), "b": (4, 4)}), a=2.0) <= 2 * 2 * 2 * 8


def test_a_client_that_comes_late_is_lifted_and_without_the_lift_favoured() -> None:
    late = {"b": 3000}
    lifted = gap(make_scheduler("dynamic+vtc", 2), rivals({"a": (4, 8), "b": (4, 8)}, 60, **late))
    favoured = gap(make_scheduler("dynamic+lcf", 2), rivals({"a": (4, 8), "b": (4, 8)}, 60, **late))
    assert lifted <= 2 * 2 * 2 * 12 < favoured


def test_service_that_a_client_had_alone_is_not_held_against_it_later() -> None:
    """Nobody waits when the other client comes: it starts from the counter of the one who was served last."""
    shape = (4, 8)
    sequences = rivals({"a": shape}, 60)
    sequences += rivals({"b": shape, "a": shape}, 60, b=20_000, a=20_000)
    for i, seq in enumerate(sequences):
        seq.id = f"r{i}"
    assert gap(make_scheduler("dynamic+vtc", 2), sequences) <= 2 * (4 + 2 * 2 * 8)


def test_equal_counters_go_by_the_order_first_seen() -> None:
    run = drive(make_scheduler("dynamic+vtc", 1), rivals({"b": (2, 2), "a": (2, 2)}, 2))
    assert order_of_admission(run) == ["b0", "a0", "b1", "a1"]


def test_round_robin_serves_each_client_a_quantum_and_a_request_at_most() -> None:
    shapes = {"a": (4, 4), "b": (12, 12), "c": (1, 20)}
    sequences = rivals(shapes, 30)
    loop = make_scheduler("dynamic+drr", 1, quantum=30)
    served = dict.fromkeys(shapes, 0)

    def planned(scheduler: Scheduler, plan: Plan) -> None:
        for seq in plan.joined:
            served[seq.client] += len(seq.prompt_ids) + seq.max_tokens
        if {seq.client for seq in scheduler.waiting} == set(shapes):
            assert max(served.values()) - min(served.values()) <= 30 + 24 + 24

    drive(loop, sequences, planned=planned)


def test_a_client_over_its_limit_is_refused_until_a_minute_has_passed() -> None:
    trace = [(0, 1, 1), (10, 1, 1), (20, 1, 1), (59, 1, 1), (61, 1, 1)]
    sequences = requests(*trace)
    loop = make_scheduler("dynamic+rpm", 4, limit=2)
    accepted = []
    for seq in sequences:
        accepted.append(loop.add(seq))
    assert accepted == [True, True, False, False, True]
    assert [s.finish_reason for s in sequences] == [None, None, "refused", "refused", None]
    assert len(loop.waiting) == 3
    assert (sequences[2].state, sequences[2].finished_at) == ("finished", 20)


@pytest.mark.parametrize(
    ("order", "options"),
    [("vtc", {}), ("vtc_pred", {}), ("drr", {}), ("rpm", {"period": 60.0}), ("ssjf", {"predictor": "mean"})],
)
def test_a_new_client_name_in_each_request_does_not_fill_the_memory(
    order: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (_fair, _predictions):
        monkeypatch.setattr(module, "KEPT", 50)
    scheduler = make_scheduler(f"dynamic+{order.replace('_', '-')}", 4, **options)
    sequences = requests(*((i * 20, 2, 3) for i in range(1000)))
    for i, seq in enumerate(sequences):
        seq.client = f"client {i}"
    drive(scheduler, sequences)
    sizes = {k: len(v) for k, v in vars(scheduler.policy).items() if hasattr(v, "__len__")}
    assert max(sizes.values()) <= 101, sizes


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), min_size=1, max_size=30), slots)
def test_accounts_of_waiting_clients_are_never_closed(trace: list[tuple[int, int]], slots: int) -> None:
    """With room for no account but those in use, each client's requests are still served, in their order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fair, "KEPT", 0)
        for order in ("vtc", "drr"):
            sequences = requests(*((at, 2, length) for at, length in sorted(trace)))
            for i, seq in enumerate(sequences):
                seq.client = f"{i % 7}"
            run = drive(make_scheduler(f"dynamic+{order}", slots), sequences)
            place = {id: i for i, id in enumerate(order_of_admission(run))}
            for client in "0123456":
                own = [place[s.id] for s in sequences if s.client == client]
                assert own == sorted(own)
