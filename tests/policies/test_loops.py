"""Each loop beyond nobatch, static and dynamic: what makes it different."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import policies
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from tests.support.scheduling import Request, Run, burst, drive, make_scheduler, next_tokens, requests
from tests.support.strategies import Pool, pools, slots, traces


def joined(run: Run) -> list[list[str]]:
    return [it.joined for it in run.iterations if it.joined]


def seen(run: Run) -> list[tuple]:
    return [(it.t, it.seconds, it.members, it.joined, it.left) for it in run.iterations]


@given(traces(), slots)
def test_elastic_holds_no_slot_and_a_member_of_a_batch_is_never_later_than_under_static(
    trace: list[Request], slots: int
) -> None:
    together = [(0, prompt, output) for _, prompt, output in trace][:slots]
    static = drive(make_scheduler("static", slots), requests(*together))
    elastic = drive(make_scheduler("elastic", slots), requests(*together))
    assert elastic.held == 0
    for early, late in zip(elastic.sequences, static.sequences):
        assert early.finished_at == early.last_token_at <= late.finished_at


@given(traces(), slots)
def test_impatient_is_static_but_for_when_it_answers(trace: list[Request], slots: int) -> None:
    runs = [drive(make_scheduler(name, slots), requests(*trace)) for name in ("static", "impatient")]
    static, impatient = ([(it.t, it.seconds, it.members) for it in run.iterations] for run in runs)
    assert static == impatient
    assert all(s.finished_at == s.last_token_at for s in runs[1].sequences)


@given(traces(), slots)
def test_static_exact_pads_nothing_and_holds_no_slot(trace: list[Request], slots: int) -> None:
    run = drive(make_scheduler("static-exact", slots), requests(*trace))
    assert run.held == sum(it.slot_steps.padding for it in run.iterations) == 0


BATCHES: dict[str, tuple[str, int, dict[str, object], list[Request], list[str], list[int]]] = {
    # What it shows: policy, slots, options, requests; the numbers of those in each batch, and when it begins.
    "groups by shape in order of first appearance": (
        "static-exact", 2, {}, [(0, 3, 2), (0, 4, 2), (0, 3, 2), (0, 3, 2), (0, 3, 1), (0, 4, 2)],
        ["02", "3", "15", "4"], [0, 30, 55, 87],
    ),
    "the queue is emptied before it is looked at again": (
        "static-exact", 4, {}, [(0, 3, 1), (0, 4, 1), (1, 3, 1), (2, 4, 1)], ["0", "1", "2", "3"], [0, 13, 27, 40],
    ),
    "exactly k, and the last when they have waited": (
        "fixed", 8, {"k": 3, "flush": 1000}, [(10 * i, 3, 2) for i in range(7)], ["012", "345", "6"], [20, 55, 1060],
    ),
    "a lone request when the window closes": ("window", 4, {"delay": 25}, [(7, 3, 2)], ["0"], [32]),
    "the largest preferred size, and later the rest": (
        "window", 16, {"delay": 500, "preferred": "4,8"}, [(0, 2, 1)] * 9, ["01234567", "8"], [0, 500],
    ),
    "collected until the oldest has waited": (
        "static-global", 2, {"flush": 30}, [(0, 2, 1), (20, 2, 1), (29, 2, 1)], ["01", "2"], [30, 44],
    ),
    "like with like in the order in which bins are full": (
        "multibin", 2, {"bounds": "5"}, [(0, 2, n) for n in (1, 9, 2, 8, 9, 1, 8, 2)], ["02", "13", "46", "57"], [0, 28, 154, 280],
    ),
    "a bin whose oldest has waited": ("multibin", 2, {"bounds": "5", "flush": 50}, [(0, 2, 1), (10, 2, 9)], ["0", "1"], [50, 62]),
}  # fmt: skip


@pytest.mark.parametrize("case", BATCHES)
def test_batches_are_formed_by_the_rule_of_the_loop(case: str) -> None:
    policy, slots, options, trace, groups, times = BATCHES[case]
    run = drive(make_scheduler(policy, slots, **options), requests(*trace))
    assert joined(run) == [[f"r{i}" for i in group] for group in groups]
    assert [it.t for it in run.iterations if it.joined] == times
    if len(trace) == 1:
        assert run.sequences[0].waited == {"window": (0, 25)}


def test_fixed_does_not_wait_when_no_request_will_arrive() -> None:
    loop = make_scheduler("fixed", 8, k=3, flush=3600)
    for seq in burst((3, 2), (3, 2)):
        loop.add(seq)
    assert loop.plan(0) is None
    loop.drain()
    plan = loop.plan(1)
    assert plan is not None
    assert len(plan.joined) == 2


@given(traces())
def test_with_one_slot_all_basic_policies_are_one_as_is_fixed_of_one(trace: list[Request]) -> None:
    loops = [make_scheduler(name, 1) for name in ("nobatch", "static", "dynamic")]
    loops += [make_scheduler("nobatch", 5), make_scheduler("fixed", 5, k=1)]
    first, *others = (seen(drive(loop, requests(*trace))) for loop in loops)
    assert all(other == first for other in others)


@given(traces(), slots, pools())
def test_window_without_delay_is_static(trace: list[Request], slots: int, pool: Pool) -> None:
    static, window = (
        seen(drive(make_scheduler(name, slots, pool()), requests(*trace))) for name in ("static", "window")
    )
    assert static == window


def test_static_global_decodes_each_batch_to_the_longest_of_all() -> None:
    run = drive(make_scheduler("static-global", 2, n=4), burst((2, 1), (2, 3), (2, 2), (2, 7)))
    assert joined(run) == [["r0", "r1"], ["r2", "r3"]]
    assert len(run.iterations) == 14
    assert run.held == (6 + 4) + (5 + 0)


@given(traces(), slots, pools())
def test_prefill_first_never_mixes_prompts_and_decodes(trace: list[Request], slots: int, pool: Pool) -> None:
    for name in ("prefill-first", "tgi", "lightllm"):
        run = drive(make_scheduler(name, slots, pool()), requests(*trace))
        for it in run.iterations:
            assert len({m.phase for m in it.members if m.phase != "idle"}) == 1, name


def test_with_a_long_prompt_the_worst_gap_is_longer_under_prefill_first_than_dynamic() -> None:
    gaps = {}
    for name in ("dynamic", "prefill-first", "chunked"):
        loop = make_scheduler(name, 4, **({"max_batched_tokens": 16} if name == "chunked" else {}))
        run = drive(loop, requests((0, 2, 9), *((15 + i, 100, 1) for i in range(3))))
        ends = [it.t + it.seconds for it in run.iterations if "r0" in {m.id for m in it.members if m.tokens}]
        gaps[name] = max(b - a for a, b in pairwise(ends))
    assert gaps["chunked"] < gaps["dynamic"] < gaps["prefill-first"]


def test_a_paused_request_is_idle_in_the_record() -> None:
    run = drive(make_scheduler("prefill-first", 2), requests((0, 4, 3), (5, 8, 1)))
    second = run.iterations[1]
    assert [(m.id, m.phase, m.tokens) for m in second.members] == [("r1", "prefill", 8), ("r0", "idle", 0)]
    assert (second.batch_size, second.slot_steps.idle) == (1, 1)


def test_prefill_first_preempts_the_newest_and_recomputes_it() -> None:
    run = drive(make_scheduler("prefill-first", 4, kv_tokens=12), burst((4, 8), (4, 4)))
    first, second = run.sequences
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert [it.preempted for it in run.iterations if it.preempted] == [["r1"]]
    assert [s.output_ids for s in run.sequences] == [list(range(8)), list(range(4))]
    assert sum(it.slot_steps.recomputed for it in run.iterations) == pytest.approx(6 / 7)
    for it in run.iterations:
        assert sum(m.computed for m in it.members if m.phase != "idle") <= 12


@given(traces(), slots, st.integers(1, 12), pools())
def test_chunked_fills_every_step_while_prompt_tokens_are_left_and_leaves_no_decode_out(
    trace: list[Request], slots: int, c: int, pool: Pool
) -> None:
    def planned(scheduler: Scheduler, plan: Plan) -> None:
        assert sum(plan.counts) <= c
        assert all(seq in plan.sequences for seq in scheduler.running if seq.output_ids)
        left = sum(seq.pending for seq in scheduler.running) > sum(plan.counts)
        queue = scheduler.pages is None and scheduler.waiting and len(scheduler.running) < slots
        assert sum(plan.counts) == c or not (left or queue)

    drive(make_scheduler("chunked", slots, pool(), max_batched_tokens=c), requests(*trace), planned=planned)


@given(traces(), slots, pools())
def test_chunked_without_end_is_dynamic(trace: list[Request], slots: int, pool: Pool) -> None:
    chunked = drive(make_scheduler("chunked", slots, pool(), max_batched_tokens=10**6), requests(*trace))
    assert seen(chunked) == seen(drive(make_scheduler("dynamic", slots, pool()), requests(*trace)))


def test_waiting_for_the_token_budget_is_reported() -> None:
    run = drive(make_scheduler("chunked", 4, max_batched_tokens=4), burst((8, 1), (2, 1)))
    assert run.sequences[1].waited == {"token_budget": (2, 28)}


def test_tgi_admits_when_enough_wait_or_after_max_waiting_decodes() -> None:
    trace = [(0, 2, 30), (0, 2, 30), (0, 2, 30), (0, 2, 30), (20, 2, 1)]
    alone = drive(make_scheduler("tgi", 8, ratio=0.5, max_waiting=5), requests(*trace))
    # one of four is fewer than half, so it waits for the fifth decode after the first step
    assert alone.sequences[4].first_iteration == 1 + 5 + 1
    company = drive(make_scheduler("tgi", 8, ratio=0.5, max_waiting=5), requests(*trace, (20, 2, 1)))
    assert [s.first_iteration for s in company.sequences[4:]] == [3, 3]


@given(traces(), slots, st.integers(20, 40))
def test_tgi_is_never_over_its_budget(trace: list[Request], slots: int, most: int) -> None:
    def planned(scheduler: Scheduler, plan: Plan) -> None:
        assert sum(seq.total for seq in scheduler.running) <= most

    drive(make_scheduler("tgi", slots, max_total_tokens=most), requests(*trace), planned=planned)


def test_tgi_lets_a_decode_follow_each_prompt_step() -> None:
    run = drive(make_scheduler("tgi", 8, ratio=0), requests(*((i, 2, 20) for i in range(5))))
    phases = ["prefill" in {m.phase for m in it.members} for it in run.iterations]
    assert not any(a and b for a, b in pairwise(phases))


@given(traces(), slots, st.integers(22, 60), st.integers(0, 4))
def test_lightllm_never_exceeds_its_pool_and_preempts_no_request(
    trace: list[Request], slots: int, pool: int, wait: int
) -> None:
    def planned(scheduler: Scheduler, plan: Plan) -> None:
        held = sum(s.computed for s in scheduler.running) + sum(plan.counts)
        assert held < pool
        assert not any(s.preemptions for s in scheduler.running)

    drive(make_scheduler("lightllm", slots, pool=pool, max_wait=wait), requests(*trace), planned=planned)


@given(traces(), slots, st.integers(1, 4), st.integers(20, 40), st.booleans())
def test_lightllm_preempts_no_request_whose_length_is_known(
    trace: list[Request], slots: int, size: int, tokens: int, prefix_cache: bool
) -> None:
    pool = PagePool(1 + -(-tokens // size), size, prefix_cache=prefix_cache)
    loop = make_scheduler("lightllm", slots, pool, max_wait=1)
    loop.policy.margin = 1
    assert not any(seq.preemptions for seq in drive(loop, requests(*trace)).sequences)


def test_lightllm_counts_on_answers_as_long_as_those_of_the_past() -> None:
    def most_at_once(past: int, answer: int) -> tuple[int, int]:
        loop = make_scheduler("lightllm", 16, PagePool(101, 4), max_wait=0)
        for i, length in enumerate([past] * 20 + [answer] * 16):
            seq = requests((0, 4, 300))[0]
            seq.id, seq.open_ended = str(i), True
            seq.stop = lambda token, length=length: "stop" if token + 1 >= length else None
            loop.add(seq)
        running = preempted = 0
        while not loop.is_idle:
            record = loop.step(next_tokens, lambda: 0.0)
            assert record is not None
            running = max(running, record.batch_size)
            preempted += len(record.preempted)
        return running, preempted

    assert most_at_once(300, 300) == (2, 0)  # the second joins when the first is about to end
    assert most_at_once(10, 10) == (16, 0)
    running, preempted = most_at_once(10, 100)
    assert running > 6
    assert preempted > 0


def test_lightllm_tries_every_ten_decodes_and_then_each_step() -> None:
    run = drive(make_scheduler("lightllm", 2), requests((0, 2, 14), (0, 2, 30), (1, 2, 1)))
    # both slots are taken until r0 is done; r0 joined in step 1, so tries are due from step 12 on
    assert [s.first_iteration for s in run.sequences] == [1, 1, 15]
    late = drive(make_scheduler("lightllm", 3), requests((0, 2, 14), (0, 2, 30), (1, 2, 1)))
    assert late.sequences[2].first_iteration == 12


def test_multibins_bins_have_equal_mass() -> None:
    policy = policies.get_policy("multibin", 1000, k=4)
    sequences = burst(*((1, 1 + i * 37 % 100) for i in range(400)))
    for seq in sequences:
        policy.on_arrival(seq, 0)
    sizes = [len(members) for members in policy._bins]  # type: ignore[attr-defined]
    assert min(sizes) > 80


def test_bucket_pads_no_more_than_static_on_the_same_burst() -> None:
    def padding(name: str, shapes: list[tuple[int, int]]) -> int:
        return sum(plan.padding for plan in drive(make_scheduler(name, 4), burst(*shapes)).plans)

    for seed in range(20):
        shapes = [(1 + (i * i + seed) * 7919 % 50, 2) for i in range(40)]
        assert padding("bucket", shapes) < padding("static", shapes)


def test_adaptive_finds_the_batch_size_that_its_target_allows_and_holds_it() -> None:
    """15 rows take 40. Few come first, then more than can be served: a step in load."""
    loop = make_scheduler("adaptive", 32, target=40, every=5)
    trace = [(i * 200, 1, 30) for i in range(20)] + [(4000 + i, 1, 30) for i in range(150)]
    run = drive(loop, requests(*trace))
    loaded = [it for it in run.iterations if it.t > 6000 and it.queue]
    assert len(loaded) > 100
    assert sum(it.seconds > 40 for it in loaded) < 0.2 * len(loaded)
    assert 8 < sum(it.batch_size for it in loaded) / len(loaded) < 15
    alone = drive(make_scheduler("adaptive", 32, target=1), requests(*trace))
    assert max(it.batch_size for it in alone.iterations) <= 2
