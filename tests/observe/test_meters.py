"""The aggregator behind /stats and /metrics, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batching import Inference, InferenceError
from observe.meters import Histogram, Meters
from scheduling.iteration import Iteration, Member, Members, SlotSteps
from stats import ServerStats


def step(end: float, *members: tuple[str, str], seconds: float = 1.0) -> Iteration:
    """Return the record of a step of a server with four slots."""
    rows = [Member(id, i, phase, 1, 1, 9) for i, (id, phase) in enumerate(members)]
    held = sum(phase == "held" for _, phase in members)
    spent = SlotSteps(useful=len(rows) - held, held=held, idle=4 - len(rows))
    return Iteration(0, end - seconds, seconds, "dynamic", 0, Members.of(rows), [], [], spent, 0, 0)


def arrived(*ids: str) -> tuple[Meters, dict[str, Inference]]:
    """Return meters that know an inference of each id, with two prompt tokens, that arrived at 0."""
    meters = Meters()
    inferences = {id: Inference("", 9, [1, 2], id=id) for id in ids}
    for inference in inferences.values():
        meters.on_arrival(inference)
    return meters, inferences


def add_tokens(inference: Inference, tokens: int = 1) -> None:
    inference.sequence.output_ids.extend([7] * tokens)


def completed(tokens: int, *, max_tokens: int, prompt: int = 2) -> Inference:
    """Return an inference that arrived at 1, started at 2, had its first token at 4, its last at 12, and ended at 13."""
    inference = Inference("", max_tokens, [1] * prompt)
    add_tokens(inference, tokens)
    seq = inference.sequence
    seq.arrived_at, seq.scheduled_at, seq.first_token_at = 1.0, 2.0, 4.0
    seq.last_token_at, seq.finished_at, seq.finish_reason = 12.0, 13.0, "length"
    return inference


def test_gaps_between_tokens_are_counted_once_for_both_views() -> None:
    meters, inferences = arrived("a", "b")
    a, b = inferences["a"], inferences["b"]
    meters.observe(step(1.0, ("a", "prefill")), [])  # the first half of its prompt
    add_tokens(a)
    meters.observe(step(2.0, ("a", "prefill")), [])
    add_tokens(a)
    add_tokens(b)
    meters.observe(step(5.0, ("a", "decode"), ("b", "prefill")), [])
    add_tokens(a)
    add_tokens(b, tokens=2)  # two in one step are two gaps of half the time
    meters.observe(step(6.0, ("a", "decode"), ("b", "decode")), [])
    meters.observe(step(9.0, ("a", "held"), ("b", "held")), [])
    assert (meters.generation_tokens, meters.prompt_tokens) == (6, 4)
    assert (sum(meters.ttft.counts), meters.ttft.sum) == (2, 2.0 + 5.0)
    assert (sum(meters.itl.counts), meters.itl.sum) == (1 + 1 + 2, 3.0 + 1.0 + 1.0)
    assert sorted(meters.recent_itl) == [0.5, 0.5, 1.0, 3.0]
    assert ServerStats(meters).snapshot()["itl-p50"] == 0.75


def test_a_step_is_prefill_decode_or_mixed() -> None:
    meters = Meters()
    for members in ([("a", "prefill")], [("a", "decode"), ("b", "held")], [("a", "decode"), ("b", "prefill")]):
        meters.observe(step(1.0, *members), [])
    assert [sum(h.counts) for h in meters.iteration_seconds.values()] == [1, 1, 1]


def test_the_intervals_of_a_request_add_up() -> None:
    meters = Meters()
    inference = completed(5, max_tokens=9)
    inference.sequence.waited = {"slots_full": (3, 0.75), "kv_full": (1, 0.25)}
    meters.observe(None, [inference])
    sums = {name: getattr(meters, name).sum for name in ("e2e", "queue", "prefill", "decode", "inference", "tpot")}
    assert sums == {"e2e": 12, "queue": 1, "prefill": 2, "decode": 8, "inference": 10, "tpot": 2}
    assert (meters.waited["slots_full"].sum, meters.waited["kv_full"].sum) == (0.75, 0.25)


def test_both_views_agree_about_completed_requests() -> None:
    meters = Meters()
    meters.observe(None, [completed(5, max_tokens=50), completed(1, max_tokens=1), completed(0, max_tokens=1)])
    stats = ServerStats(meters)
    snapshot = stats.snapshot()
    assert (snapshot["requests"], snapshot["total-tokens-handled"], snapshot["total-elapsed-time"]) == (2, 6, 24)
    assert snapshot["latency-per-token"] == pytest.approx((12 / 5 + 12 / 1) / 2)
    assert snapshot["throughput-wall"] == pytest.approx(6 / 12)
    assert (snapshot["ttft-p50"], snapshot["latency-p90"]) == (3, 12)
    assert snapshot["tpot-p50"] == 2  # of the first alone: one token has no time between tokens
    assert stats.token_breakdown() == {1: 12.0, 50: 12.0}
    assert meters.output_length.sum == 6
    assert sum(meters.e2e.counts) == 3  # without a token there is no time per token, but a request


@pytest.mark.parametrize(
    ("scheduled", "tokens", "where"), [(None, 0, "queued"), (1.0, 0, "prefill"), (1.0, 1, "decode")]
)
def test_a_cancelled_request_is_counted_by_its_state(scheduled: float | None, tokens: int, where: str) -> None:
    meters, inferences = arrived("a")
    inferences["a"].sequence.scheduled_at = scheduled
    inferences["a"].error = InferenceError("cancelled", "gone")
    add_tokens(inferences["a"], tokens)
    meters.observe(None, [inferences["a"]])
    assert meters.cancelled == {where: 1}
    assert sum(meters.e2e.counts) == 0


def test_requests_that_failed_are_counted_by_how() -> None:
    meters = Meters()
    for kind in ("cancelled", "timeout_error", "server_error", "out_of_memory", ""):
        inference = completed(2, max_tokens=2)
        inference.error = InferenceError(kind, "") if kind else None
        meters.observe(None, [inference])
    snapshot = ServerStats(meters).snapshot()
    counts = ("requests", "requests-failed", "requests-cancelled", "requests-timed-out", "total-tokens-handled")
    assert [snapshot[key] for key in counts] == [1, 2, 1, 1, 2]


def test_steps_are_counted_by_batch_size() -> None:
    meters = Meters()
    meters.observe(step(1, ("a", "prefill")), [])
    meters.observe(step(3, ("a", "decode"), ("b", "held"), seconds=2.0), [])
    meters.observe(step(7, ("a", "decode"), ("b", "held"), seconds=4.0), [])
    engine = ServerStats(meters).engine()
    assert engine["iterations"] == 3
    assert engine["batch_stats"] == [
        {"batch_size": 1, "count": 1, "seconds": 1.0},
        {"batch_size": 2, "count": 2, "seconds": 6.0},
    ]
    assert engine["slot_steps"] == {"useful": 3, "padding": 0, "held": 2, "idle": 7, "recomputed": 0, "rejected": 0}
    assert (sum(meters.batch_sizes.counts), meters.batch_sizes.sum) == (3, 5)


def test_a_value_on_a_bound_belongs_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for x in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(x)
    assert (histogram.counts, histogram.sum) == ([2, 2, 1], 7.5)


def test_the_tokens_of_a_step_that_follow_the_same_gap_are_one_update(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = []
    observe = Histogram.observe
    monkeypatch.setattr(Histogram, "observe", lambda *update: updates.append(update) or observe(*update))
    ids = [f"r{i}" for i in range(64)]
    meters, inferences = arrived(*ids)
    for n in range(1, 101):
        for inference in inferences.values():
            add_tokens(inference)
        meters.observe(step(n / 100, *((id, "decode") for id in ids)), [])
    assert meters.generation_tokens == 6400
    assert sum(meters.itl.counts) == 6400 - 64
    assert len(updates) <= 64 + 3 * 100


def test_a_request_that_was_that_never_arrived_is_no_error() -> None:
    meters = Meters()
    meters.observe(step(1.0, ("who", "decode")), [Inference("", 1, [1])])
    assert meters.generation_tokens == 0


def test_memory_stays_bounded_by_the_open_requests() -> None:
    meters, inferences = arrived("a", "b")
    meters.observe(None, [inferences["a"]])
    assert len(meters._open) == 1


def test_the_time_that_steps_waited_for_masks_adds_up() -> None:
    meters = Meters()
    for waited in (0.25, 0.0, 0.5):
        meters.observe(replace(step(1, ("a", "decode")), mask_seconds=waited), [])
    assert meters.mask_seconds == ServerStats(meters).engine()["mask_seconds"] == 0.75
