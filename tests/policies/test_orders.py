"""Each order on its own: who is first, what it promises, and what it is good for. Clients are served in toy time."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from driver import Request, Run, drive, pools, requests, traces
from hypothesis import given
from hypothesis import strategies as st

import policies
from policies.orders import _fair, _predictions, vtc
from policies.orders._predictions import chance, gauss
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence

Pool = Callable[[], PagePool | None]
EVERY = policies.order_names()
UNGUARDED: dict[str, object] = {"guard": "inf", "guard_ratio": "inf"}
slots = st.integers(1, 5)


def made(name: str, slots: int, pages: PagePool | None = None, **options: object) -> Scheduler:
    return Scheduler(policies.get_policy(name, slots, options), pages, 1 << 30)


def many(n: int, seed: int, gap: float = 0, longest: int = 128) -> list[Sequence]:
    """Return n requests of random lengths whose arrivals are `gap` apart in the mean."""
    rng = random.Random(seed)
    now, sequences = 0, []
    for i in range(n):
        now += round(rng.expovariate(1 / gap)) if gap else 0
        sequences.append(Sequence([1], rng.randint(1, longest), id=f"r{i}", arrived_at=now))
    return sequences


def mean_latency(run: Run) -> float:
    return sum(s.finished_at - s.arrived_at for s in run.sequences) / len(run.sequences)


def order_of_admission(run: Run) -> list[str]:
    return [id for it in run.iterations for id in it.joined]


@pytest.mark.parametrize("order", EVERY)
@given(traces(), slots, pools())
def test_with_equal_requests_of_one_client_every_order_is_first_come_first_served(
    order: str, trace: list[Request], slots: int, pool: Pool
) -> None:
    alike = [(arrival, [0, 0], 3) for arrival, _, _ in trace]
    exact: dict[str, object] = {"predictor": "oracle"} if order == "ssjf" else {}
    run = drive(made(f"dynamic+{order}", slots, pool(), **exact), requests(*alike))
    if not any(s.preemptions for s in run.sequences):
        assert order_of_admission(run) == [s.id for s in run.sequences]


@pytest.mark.parametrize("order", [o for o in EVERY if o not in ("srpt", "mlfq")])
def test_one_server_does_the_same_work_in_any_order(order: str) -> None:
    """The sum of service x wait is the same for every order that conserves work and preempts nobody."""
    sums = set()
    for name in (f"nobatch+{order}", "nobatch"):
        sequences = many(30, seed=3, gap=500)
        for i, seq in enumerate(sequences):
            seq.client, seq.priority, seq.deadline = "ab"[i % 2], i % 3, 100.0 * (i * 7 % 11)
        run = drive(made(name, 1), sequences)
        spans = [(s.finished_at - s.scheduled_at, s.scheduled_at - s.arrived_at) for s in sequences]
        sums.add(sum(service * wait for service, wait in spans))
        assert run.now == max(s.finished_at for s in sequences)
    assert len(sums) == 1


def test_shortest_first_saves_the_gini_coefficient_of_a_bursts_wait() -> None:
    waits = {}
    for name, options in (("nobatch", {}), ("nobatch+sjf", UNGUARDED)):
        sequences = many(80, seed=1)
        drive(made(name, 1, **options), sequences)
        waits[name] = sum(s.scheduled_at for s in sequences)
    services = sorted(s.finished_at - s.scheduled_at for s in sequences)
    n = len(services)
    gini = sum((2 * i - n + 1) * s for i, s in enumerate(services)) / (n * sum(services))
    fcfs = (n - 1) / 2 * sum(services)  # the mean over all orders
    assert waits["nobatch+sjf"] == pytest.approx(fcfs * (1 - gini * n / (n - 1)))
    assert waits["nobatch+sjf"] < waits["nobatch"]


def test_better_predictions_wait_less() -> None:
    def wait(**options: object) -> float:
        sequences = many(150, seed=2)
        drive(made("nobatch+sjf", 1, **UNGUARDED, **options), sequences)
        return sum(s.scheduled_at for s in sequences)

    classes = {"predictor": "classes"}
    waits = [wait(), wait(**classes, classes=4), wait(**classes), wait(**classes, accuracy=0.8), wait(predictor="mean")]
    assert waits == sorted(waits)
    assert wait() < wait(predictor="noisy", sigma=0.5) < wait(predictor="noisy", sigma=3)


def test_without_error_every_predictor_is_the_oracle() -> None:
    def admitted(**options: object) -> list[str]:
        return order_of_admission(drive(made("nobatch+sjf", 1, **options), many(50, seed=4)))

    assert admitted() == admitted(predictor="noisy", sigma=0)
    assert admitted() == admitted(predictor="uniform", error=0)
    assert admitted() == admitted(predictor="classes", classes=128)


def test_a_uniform_error_is_drawn_evenly_and_never_larger_than_it_says() -> None:
    policy = policies.get_policy("dynamic+sjf", 4, {"predictor": "uniform", "error": "0.25"})
    errors = [policy.predict(s) / s.max_tokens - 1 for s in many(3000, seed=8)]  # type: ignore[attr-defined]
    assert -0.25 < min(errors) < -0.24
    assert 0.24 < max(errors) < 0.25
    assert sum(errors) / 3000 == pytest.approx(0, abs=0.01)
    assert sum(e * e for e in errors) / 3000 == pytest.approx(0.25**2 / 3, rel=0.05)


def test_chance_in_predictions_belongs_to_seed_and_id() -> None:
    drawn = [chance(0, f"r{i}") for i in range(2000)]
    normal = [gauss(0, f"r{i}") for i in range(2000)]
    assert drawn == [chance(0, f"r{i}") for i in range(2000)]
    assert drawn != [chance(1, f"r{i}") for i in range(2000)]
    assert sum(drawn) / 2000 == pytest.approx(0.5, abs=0.03)
    assert sum(normal) / 2000 == pytest.approx(0, abs=0.1)
    assert sum(x * x for x in normal) / 2000 == pytest.approx(1, abs=0.12)


def test_four_in_five_are_put_into_the_right_one_of_two_classes() -> None:
    policy = policies.get_policy("static+sjf", 4, {"predictor": "classes", "accuracy": "0.8"})
    right = [
        (policy.predict(s) > 64) == (s.max_tokens > 64)  # type: ignore[attr-defined]
        for s in many(3000, seed=5)
    ]
    assert sum(right) / 3000 == pytest.approx(0.8, abs=0.03)


def test_a_mean_is_of_the_clients_own_last_answers() -> None:
    policy = policies.get_policy("dynamic+sjf", 4, {"predictor": "mean", "recent": "2"})
    for i, tokens in enumerate([90, 10, 20]):
        seq = Sequence([1], 100, id=f"a{i}", client="a")
        seq.output_ids = [0] * tokens
        policy.on_finish(seq, 1.0)
    for client, mean in (("a", 15), ("b", 15)):
        assert policy.predict(Sequence([1], 100, client=client)) == mean  # type: ignore[attr-defined]


def test_the_guard_lets_no_long_request_wait_much_longer_than_it_says() -> None:
    def longest_wait(**options: object) -> int:
        trace = [(0, 1, 4), (1, 1, 100), *((2 + 20 * i, 1, 2) for i in range(300))]
        run = drive(made("nobatch+sjf", 1, **options), requests(*trace))
        return run.sequences[1].scheduled_at - 1

    assert longest_wait(**UNGUARDED) > 5000
    assert longest_wait(guard=500, guard_ratio="inf") <= 500 + 13 + 12
    assert longest_wait(guard="inf", guard_ratio=0.5) < 1500


def test_a_higher_class_waits_less_and_ageing_lifts_the_lower() -> None:
    def waits(**options: object) -> list[float]:
        sequences = many(300, seed=6, gap=850)
        for i, seq in enumerate(sequences):
            seq.priority = i % 3
        drive(made("nobatch+priority", 1, **options), sequences)
        return [sum(s.scheduled_at - s.arrived_at for s in sequences[k::3]) for k in range(3)]

    strict, aged, fcfs = waits(), waits(aging=3000), waits(aging=1e-9)
    assert strict[0] < strict[1] < strict[2]
    assert strict[0] < aged[0] < aged[2] < strict[2]
    assert max(fcfs) < 1.3 * min(fcfs)


def test_by_deadline_more_are_in_time_than_by_arrival() -> None:
    def in_time(name: str) -> int:
        sequences = many(200, seed=7, gap=700)
        for i, seq in enumerate(sequences):
            seq.deadline = seq.arrived_at + (1500 if i % 2 else 30_000)
        drive(made(name, 1), sequences)
        return sum(s.finished_at <= s.deadline for s in sequences)

    assert in_time("nobatch+edf") > 1.3 * in_time("nobatch")


def test_a_request_without_a_deadline_gets_the_default_one() -> None:
    trace = [(0, 1, 1), (1, 1, 9), (2, 1, 1)]
    run = drive(made("nobatch+edf", 1, slo=5, slo_per_token=10), requests(*trace))
    assert order_of_admission(run) == ["r0", "r2", "r1"]


def test_longest_prefix_first_hits_more_of_the_cache() -> None:
    def hits(name: str, **options: object) -> int:
        prompts = [[k] * 8 + [100 + i] for i in range(6) for k in range(4)]
        pool = PagePool(8, 4)
        drive(made(name, 1, pool, **options), requests(*((0, p, 2) for p in prompts)))
        return pool.hit_tokens

    assert hits("dynamic+lpm") > 2 * hits("dynamic")
    assert hits("dynamic+lpm", most=3) < hits("dynamic+lpm")


@pytest.mark.parametrize("seed", range(4))
def test_least_remaining_first_is_no_slower_than_first_come_with_exact_predictions(seed: int) -> None:
    fcfs = drive(made("dynamic", 4), many(200, seed, gap=300))
    srpt = drive(made("dynamic+srpt", 4), many(200, seed, gap=300))
    assert any(s.preemptions for s in srpt.sequences)
    assert mean_latency(srpt) < mean_latency(fcfs)


def test_nobody_is_displaced_who_is_nearly_done() -> None:
    def displaced(c: float, shorts: int) -> int:
        trace = [(0, 1, 20), (shorts, 1, 2)]
        return drive(made("dynamic+srpt", 1, c=c), requests(*trace)).sequences[0].preemptions

    # by 100 the long one has 8 of its 20 tokens
    assert [displaced(c, 100) for c in (0, 0.3, 0.5, 1)] == [0, 0, 1, 1]


def test_what_is_computed_anew_is_in_the_record() -> None:
    run = drive(made("dynamic+srpt", 1), requests((0, 3, 9), (40, 3, 2)))
    long = run.sequences[0]
    assert (long.preemptions, long.recompute_until) == (1, 6)
    assert [it.preempted for it in run.iterations if it.preempted] == [["r0"]]
    again = [it for it in run.iterations if it.slot_steps.recomputed]
    assert [it.slot_steps.recomputed for it in again] == [pytest.approx(6 / 7)]
    assert long.output_ids == list(range(9))


def heavy_tail(seed: int) -> list[Sequence]:
    sequences = many(200, seed, gap=100, longest=12)
    for seq in sequences[::10]:
        seq.max_tokens = 150
    return sequences


@pytest.mark.parametrize("seed", range(3))
def test_levels_help_when_lengths_are_unknown_and_heavy_tailed(seed: int) -> None:
    fcfs = drive(made("dynamic", 2), heavy_tail(seed))
    mlfq = drive(made("dynamic+mlfq", 2, quantum=200, prompt_pace=0), heavy_tail(seed))
    assert mean_latency(mlfq) < mean_latency(fcfs)


def test_a_long_prompt_skips_the_levels_that_it_could_not_finish_in() -> None:
    policy = policies.get_policy("dynamic+mlfq", 4, {"quantum": "10", "prompt_pace": "1"})
    sequences = requests(*((0, length, 1) for length in (3, 10, 11, 20, 21, 100)))
    assert [policy._level_of(s) for s in sequences] == [0, 0, 1, 1, 2, 4]  # type: ignore[attr-defined]


def test_who_has_waited_too_long_is_lifted_to_the_top() -> None:
    def wait(**options: object) -> int:
        trace = [(0, 1, 8), *((10 * i, 1, 1) for i in range(1, 200))]
        loop = made("dynamic+mlfq", 1, quantum=60, prompt_pace=0, **options)
        return drive(loop, requests(*trace)).sequences[0].finished_at

    assert 5 * wait(lift_every=5, starving=100) < wait(lift_every=10**6)


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
    fair = gap(made("dynamic+vtc", 4), rivals(SHAPES))
    assert fair <= bound
    assert gap(made("dynamic", 4), rivals(SHAPES)) > 2 * fair


def test_charging_ahead_with_exact_predictions_narrows_the_gap() -> None:
    shapes = {"a": (2, 10), "b": (2, 40)}
    vtc = gap(made("dynamic+vtc", 8), rivals(shapes, 80))
    exact = gap(made("dynamic+vtc-pred", 8, predictor="oracle"), rivals(shapes, 80))
    assert exact < vtc / 2


def test_the_larger_the_error_of_a_prediction_the_wider_the_gap() -> None:
    shapes = {"a": (2, 30), "b": (2, 90)}

    def width(name: str, **options: object) -> float:
        return gap(made(f"dynamic+{name}", 8, **options), rivals(shapes, 80))

    widths = [width("vtc-pred", predictor="uniform", error=error) for error in (0, 0.5, 1)]
    assert widths[0] == width("vtc-pred", predictor="oracle")
    assert widths == sorted(set(widths))
    assert widths[-1] < width("vtc") / 2


def test_what_was_charged_ahead_is_settled_in_the_end() -> None:
    for predictor in ("oracle", "noisy", "uniform", "mean"):
        loop = made("dynamic+vtc-pred", 3, predictor=predictor)
        drive(loop, rivals(SHAPES, 10))
        assert loop.policy.counters == pytest.approx({"a": 160, "b": 420})  # type: ignore[attr-defined]


def test_a_counter_counts_each_prompt_and_token_once() -> None:
    loop = made("dynamic+vtc", 3, w_p=1, w_q=2)
    drive(loop, rivals(SHAPES, 10))
    assert loop.policy.counters == {"a": 10 * (12 + 2 * 2), "b": 10 * (2 + 2 * 20)}  # type: ignore[attr-defined]


def profiled(prompt: int, output: int) -> float:
    """Return the milliseconds that the paper's authors measured for such a request, by their fit."""
    return 0.21001891 * prompt + 0.10075395 * output + 0.0039868 * prompt * output + 0.00324733 * output**2 + 1.14601454


def test_the_profiled_cost_is_the_fit_of_the_papers_profile() -> None:
    path = Path(__file__).parents[3] / "shared" / "data" / "vtc" / "cost_profile.json"
    if not path.is_file():
        pytest.skip("shared/data/vtc/cost_profile.json is not beside the repository")
    rows = [
        (int(p), int(n), 1000 * (prefill + decode))
        for p, by_output in json.loads(path.read_text()).items()
        for n, (_, prefill, decode) in by_output.items()
    ]
    p, n, t = np.array(rows).T
    found = np.linalg.lstsq(np.stack([p, n, p * n, n * n, np.ones(len(t))], 1), t, rcond=None)[0]
    assert found == pytest.approx(vtc.PROFILE, rel=1e-6)


@pytest.mark.parametrize("order", ["vtc", "vtc-pred"])
def test_a_profiled_cost_charges_each_request_for_its_lengths(order: str) -> None:
    loop = made(f"dynamic+{order}", 3, cost="profile")
    drive(loop, rivals(SHAPES, 10))
    wanted = {client: 10 * profiled(*shape) for client, shape in SHAPES.items()}
    assert loop.policy.counters == pytest.approx(wanted)  # type: ignore[attr-defined]


def test_a_profiled_cost_charges_ahead_by_the_prediction() -> None:
    loop = made("dynamic+vtc-pred", 1, cost="profile", predictor="oracle")
    loop.add(Sequence([1] * 12, 40, client="a"))
    loop.plan(0)
    assert loop.policy.counters == pytest.approx({"a": profiled(12, 40)})  # type: ignore[attr-defined]


def test_by_profiled_cost_those_who_read_long_contexts_get_fewer_tokens() -> None:
    shapes = {"short": (10, 100), "long": (1000, 100)}

    def share_of_long(**options: object) -> float:
        sequences = rivals(shapes, 60)
        scheduler = made("dynamic+vtc", 4, w_p=0, **options)
        first = set()

        def planned(scheduler: Scheduler, plan: Plan) -> None:
            if scheduler.number < 1500:
                first.update(plan.joined)

        drive(scheduler, sequences, planned=planned)
        return sum(seq.client == "long" for seq in first) / len(first)

    assert share_of_long() == pytest.approx(0.5, abs=0.05)
    wanted = profiled(10, 100) / (profiled(10, 100) + profiled(1000, 100))
    assert share_of_long(cost="profile") == pytest.approx(wanted, abs=0.05)


def test_the_papers_code_counts_decodes_and_all_of_them_again_when_somebody_finishes() -> None:
    loop = made("dynamic+vtc", 3, count_twice="on")
    drive(loop, [Sequence([1] * 5, 3, client="a"), Sequence([1] * 5, 5, client="b")])
    # prompts 5 each; decodes 2 and 4; r0 ends with the 2nd decode, r1 with the 4th
    assert loop.policy.counters == {"a": 5 + 2 * 2 + 2, "b": 5 + 4 * 2 + 2 + 2}  # type: ignore[attr-defined]


def test_the_papers_code_is_one_token_behind_with_a_profiled_cost() -> None:
    loop = made("dynamic+vtc", 3, count_twice="on", cost="profile")
    drive(loop, [Sequence([1] * 5, 3, client="a"), Sequence([1] * 5, 5, client="b")])

    def token(number: int) -> float:
        return profiled(5, number) - profiled(5, number - 1)

    # before each decode the token before it is charged, and the last one again when somebody finishes
    a = profiled(5, 0) + token(1) + token(2) + token(3)
    b = profiled(5, 0) + sum(token(k) for k in (1, 2, 3, 4)) + token(3) + token(5)
    assert loop.policy.counters == pytest.approx({"a": a, "b": b})  # type: ignore[attr-defined]


def test_a_client_of_twice_the_weight_is_served_twice() -> None:
    loop = made("dynamic+vtc", 2, weights="a:2")
    assert gap(loop, rivals({"a": (4, 4), "b": (4, 4)}), a=2.0) <= 2 * 2 * 2 * 8


def test_a_client_that_comes_late_is_lifted_and_without_the_lift_favoured() -> None:
    late = {"b": 3000}
    lifted = gap(made("dynamic+vtc", 2), rivals({"a": (4, 8), "b": (4, 8)}, 60, **late))
    favoured = gap(made("dynamic+lcf", 2), rivals({"a": (4, 8), "b": (4, 8)}, 60, **late))
    assert lifted <= 2 * 2 * 2 * 12 < favoured


def test_service_that_a_client_had_alone_is_not_held_against_it_later() -> None:
    """Nobody waits when the other client comes: it starts from the counter of the one who was served last."""
    shape = (4, 8)
    sequences = rivals({"a": shape}, 60)
    sequences += rivals({"b": shape, "a": shape}, 60, b=20_000, a=20_000)
    for i, seq in enumerate(sequences):
        seq.id = f"r{i}"
    assert gap(made("dynamic+vtc", 2), sequences) <= 2 * (4 + 2 * 2 * 8)


def test_equal_counters_go_by_who_was_seen_first() -> None:
    run = drive(made("dynamic+vtc", 1), rivals({"b": (2, 2), "a": (2, 2)}, 2))
    assert order_of_admission(run) == ["b0", "a0", "b1", "a1"]


@given(traces(), slots, pools())
def test_fair_orders_leave_no_slot_empty_while_somebody_fits(trace: list[Request], slots: int, pool: Pool) -> None:
    for order in ("vtc", "vtc-pred", "lcf", "drr"):
        sequences = requests(*trace)
        for i, seq in enumerate(sequences):
            seq.client = "abc"[i * 7 % 3]

        def planned(scheduler: Scheduler, plan: Plan) -> None:
            if scheduler.waiting and len(scheduler.running) < slots:
                assert scheduler._wait_clock.reason == "kv_full"

        drive(made(f"dynamic+{order}", slots, pool()), sequences, planned=planned)


def test_round_robin_serves_each_client_a_quantum_and_a_request_at_most() -> None:
    shapes = {"a": (4, 4), "b": (12, 12), "c": (1, 20)}
    sequences = rivals(shapes, 30)
    loop = made("dynamic+drr", 1, quantum=30)
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
    loop = made("dynamic+rpm", 4, limit=2)
    accepted = []
    for seq in sequences:
        accepted.append(loop.add(seq))
    assert accepted == [True, True, False, False, True]
    assert [s.finish_reason for s in sequences] == [None, None, "refused", "refused", None]
    assert len(loop.waiting) == 3
    assert (sequences[2].state, sequences[2].finished_at) == ("finished", 20)


def test_every_order_goes_with_every_loop() -> None:
    """Two clients, a cancelled one, little room: no name of a loop's is an order's by accident."""
    for loop, order in itertools.product(policies.names(), EVERY):
        sequences = [
            Sequence([1] * (1 + i % 4), 1 + i % 3, id=f"r{i}", client="ab"[i % 2], arrived_at=9 * (i // 3))
            for i in range(12)
        ]
        pool = PagePool(9, 2)
        drive(made(f"{loop}+{order}", 3, pool), sequences, cancel={2: [0], 4: [1]})


@pytest.mark.parametrize(
    ("order", "options"),
    [("vtc", {}), ("vtc_pred", {}), ("drr", {}), ("rpm", {"period": 60.0}), ("ssjf", {"predictor": "mean"})],
)
def test_who_names_a_new_client_with_each_request_does_not_fill_the_memory(
    order: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (_fair, _predictions):
        monkeypatch.setattr(module, "KEPT", 50)
    scheduler = made(f"dynamic+{order.replace('_', '-')}", 4, **options)
    sequences = requests(*((i * 20, 2, 3) for i in range(1000)))
    for i, seq in enumerate(sequences):
        seq.client = f"client {i}"
    drive(scheduler, sequences)
    sizes = {k: len(v) for k, v in vars(scheduler.policy).items() if hasattr(v, "__len__")}
    assert max(sizes.values()) <= 101, sizes


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), min_size=1, max_size=30), slots)
def test_accounts_of_who_waits_are_never_closed(trace: list[tuple[int, int]], slots: int) -> None:
    """With room for no account but those in use, each client's requests are still served, in their order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fair, "KEPT", 0)
        for order in ("vtc", "drr"):
            sequences = requests(*((at, 2, length) for at, length in sorted(trace)))
            for i, seq in enumerate(sequences):
                seq.client = f"{i % 7}"
            run = drive(made(f"dynamic+{order}", slots), sequences)
            place = {id: i for i, id in enumerate(order_of_admission(run))}
            for client in "0123456":
                own = [place[s.id] for s in sequences if s.client == client]
                assert own == sorted(own)
