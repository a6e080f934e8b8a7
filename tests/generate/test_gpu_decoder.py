"""Steps that were launched ahead are used when they fit, and change no text when they do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from test_gpu_runner import CONFIG, gpu_runner

import policies
from generate.gpu.rows import Download
from generate.gpu.runner import GpuRunner
from generate.params import GREEDY, SamplingParams
from generate.sampling import NotFinite
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.scheduler import Output, Scheduler
from scheduling.sequence import Sequence
from tests.support.generate import make_model, ragged, run


def drive(forward: Callable[[Plan], list[Output]], requests: list[Sequence], pages: int = 120) -> Scheduler:
    """Return a scheduler in which all requests run, after their first step."""
    scheduler = Scheduler(policies.get_policy("dynamic", 8), PagePool(pages, 64), 2048)
    for seq in requests:
        scheduler.add(seq)
    scheduler.step(forward, lambda: 0.0)
    return scheduler


def finish(scheduler: Scheduler, forward: Callable[[Plan], list[Output]]) -> None:
    while not scheduler.is_idle:
        scheduler.step(forward, lambda: 0.0)


def test_a_steady_batch_is_always_one_step_ahead() -> None:
    runner = gpu_runner()
    requests = [Sequence([i + 1] * 5, 20, sampling=SamplingParams(seed=i)) for i in range(4)]
    scheduler = drive(runner.forward, requests)
    finish(scheduler, runner.forward)
    assert runner.decoder.used_ahead == 19  # all decodes: the first was launched while the prompts were computed


def test_texts_at_a_temperature_are_the_same_with_the_kernels_that_draw() -> None:
    pytest.importorskip("triton", reason="Triton is not there: pip install triton")
    from generate.gpu import triton_sampling

    def requests() -> list[Sequence]:
        return [Sequence([i + 1] * 5, 6, sampling=SamplingParams(temperature=i % 3, seed=i)) for i in range(5)]

    runner = gpu_runner()
    drawn: list[int] = []
    runner.decoder.fast_draw = lambda logits, *row: (drawn.append(len(logits)), triton_sampling.draw(logits, *row))[1]
    assert runner.kernels["drawing"] == "triton"
    assert run(None, requests(), runner=runner) == run(make_model(CONFIG), requests())
    assert drawn


@pytest.mark.parametrize("budget", [2048, 24])
def test_steps_that_prompts_join_and_requests_leave_are_launched_ahead(budget: int) -> None:
    runner = gpu_runner()
    requests = ragged(CONFIG, 40, 9)
    decodes = 0

    def forward(plan: Plan) -> list[Output]:
        nonlocal decodes
        decodes += any(seq.output_ids for seq in plan.sequences)
        return runner.forward(plan)

    tokens = run(None, requests, runner=SimpleNamespace(forward=forward), budget=budget, arrivals=2)
    assert runner.decoder.used_ahead == decodes > 60
    assert tokens == run(make_model(CONFIG), ragged(CONFIG, 40, 9), budget=budget, arrivals=2)


def test_the_next_step_is_launched_before_the_host_reads_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = gpu_runner()
    events: list[str] = []
    launch, read = runner.decoder.replayer.run, Download.read
    monkeypatch.setattr(runner.decoder.replayer, "run", lambda *how: (events.append("launch"), launch(*how))[1])
    monkeypatch.setattr(Download, "read", lambda copy: (events.append("read"), read(copy))[1])
    scheduler = drive(runner.forward, [Sequence([1, 2], 9, sampling=SamplingParams(seed=1))])
    assert [key for key, _ in itertools.groupby(events)] == ["launch", "read"]
    for _ in range(2):
        events.clear()
        scheduler.add(Sequence([3, 4], 9, sampling=SamplingParams(seed=2)))
        scheduler.step(runner.forward, lambda: 0.0)
        assert [key for key, _ in itertools.groupby(events)] == ["launch", "read"]


def test_a_first_token_that_the_host_draws_is_not_decoded_ahead() -> None:
    def requests() -> list[Sequence]:
        kinds = {"flat": SamplingParams(temperature=50.0, top_p=0.97, seed=3), "plain": SamplingParams(seed=4)}
        kinds |= {
            "processed": SamplingParams(seed=5, repetition_penalty=1.3),
            "scored": SamplingParams(prompt_logprobs=0),
        }
        return [Sequence([1, 2, i], 6, id=kind, sampling=kinds[kind]) for i, kind in enumerate([*kinds, "plain"])]

    for slots in (2, 8):
        expected = run(make_model(CONFIG), requests(), slots=slots)
        assert run(None, requests(), runner=gpu_runner(), slots=slots) == expected


def test_the_remaining_sequences_use_the_step_ahead_after_one_left() -> None:
    runner = gpu_runner()
    requests = [Sequence([i + 1] * 5, 12, sampling=SamplingParams(seed=i)) for i in range(8)]
    scheduler = drive(runner.forward, requests)
    for _ in range(4):
        scheduler.step(runner.forward, lambda: 0.0)
    used = runner.decoder.used_ahead
    scheduler.remove_all([requests[3]], 0.0)
    scheduler.step(runner.forward, lambda: 0.0)
    assert runner.decoder.used_ahead == used + 1
    finish(scheduler, runner.forward)
    expected = run(make_model(CONFIG), [Sequence([i + 1] * 5, 12, sampling=SamplingParams(seed=i))
                                        for i in range(8) if i != 3])  # fmt: skip
    assert [seq.output_ids for seq in requests if seq is not requests[3]] == expected


def test_no_step_is_launched_ahead_for_a_position_behind_the_context() -> None:
    runner = gpu_runner()
    context = CONFIG.block_size
    context_lens: list[int] = []
    runner.decoder.row_logits = lambda rows, size: (
        context_lens.append(int(rows.context_lens.max())),
        runner._row_logits(rows, size),
    )[1]
    seq = Sequence([1] * (context - 3), 1 << 20, sampling=GREEDY)  # which requests more than the context
    seq.output_ids, seq.computed = [1], context - 3
    seq.pages = list(range(1, 1 + context // 64))
    for _ in range(3):
        (token,) = runner.forward(Plan(1, 0.0, [seq], [1]))
        seq.output_ids.append(token)
        seq.computed += 1
    assert context_lens == [context - 2, context - 1, context]


def test_pages_of_a_sequence_that_left_are_safe_for_the_next() -> None:
    runner = gpu_runner()
    params = SamplingParams(temperature=0.0)
    leaver = Sequence([5] * 60, 40, sampling=params)
    stayer = Sequence([6] * 10, 60, sampling=params)
    scheduler = drive(runner.forward, [leaver, stayer], pages=5)  # they have all pages
    for _ in range(7):
        scheduler.step(runner.forward, lambda: 0.0)
    comer = Sequence([7] * 90, 30, sampling=params)
    scheduler.add(comer)
    freed = set(leaver.pages)
    scheduler.remove_all([leaver], 0.0)  # while a step with it is in flight
    scheduler.step(runner.forward, lambda: 0.0)
    assert set(comer.pages) & freed
    finish(scheduler, runner.forward)
    expected = run(make_model(CONFIG), [Sequence([6] * 10, 60, sampling=params),
                                        Sequence([7] * 90, 30, sampling=params)])  # fmt: skip
    assert [stayer.output_ids, comer.output_ids] == expected


def test_a_sequence_that_moved_to_other_pages_does_not_use_the_step_ahead() -> None:
    runner = gpu_runner()
    seq = Sequence([5] * 60, 12, sampling=GREEDY, pages=[1, 2])
    for step in range(12):
        if step == 6:
            for pool in (runner.keys, runner.values):
                pool[:, 3:5] = torch.nan
                pool[:, 3, :, : seq.computed] = pool[:, 1, :, : seq.computed]
                pool[:, 4, :, : seq.computed - 64] = pool[:, 2, :, : seq.computed - 64]
            seq.pages = [3, 4]
        (token,) = runner.forward(Plan(step, 0.0, [seq], [seq.pending]))
        assert isinstance(token, int)
        seq.computed = seq.length
        seq.output_ids.append(token)
    assert runner.decoder.used_ahead == 10  # of 11 decodes, the one after the move was not
    assert [seq.output_ids] == run(make_model(CONFIG), [Sequence([5] * 60, 12, sampling=GREEDY)])


def test_a_step_that_fails_or_runs_twice_changes_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = gpu_runner()
    requests = ragged(CONFIG, 6, 5, temperature=1.0)
    steps = 0

    def forward(plan: Plan) -> list[Output]:
        nonlocal steps
        steps += 1
        if steps % 4 == 0:
            with monkeypatch.context() as broken:
                broken.setattr(runner.decoder.replayer, "run", None)
                with pytest.raises(TypeError):  # noqa: PT012
                    runner.forward(plan)
                    runner.forward(plan)
            assert runner.decoder.ahead is None
        first = runner.forward(plan)
        return runner.forward(plan) if steps % 3 == 0 else first

    scheduler = drive(forward, requests)
    finish(scheduler, forward)
    expected = run(make_model(CONFIG), ragged(CONFIG, 6, 5, temperature=1.0))
    assert [seq.output_ids for seq in requests] == expected


def test_a_row_that_is_not_finite_fails_alone() -> None:
    poisoned = CONFIG.vocab_size - 1
    model = make_model(CONFIG)
    wpe = model.transformer.wpe.weight.clone()
    wpe[12] = float("nan")  # a decode at position 12 breaks
    model.transformer.wpe.weight = torch.nn.Parameter(wpe, requires_grad=False)
    runner = GpuRunner(model, 120, 64, capacity=8)
    params = SamplingParams(temperature=0)
    bad = Sequence([1] * 10, 8, id="bad", sampling=params)
    good = [Sequence([poisoned - 1, 2, i], 6, sampling=params) for i in range(3)]
    scheduler = drive(runner.forward, [good[0], bad, *good[1:]])
    finish(scheduler, runner.forward)
    assert isinstance(bad.error, NotFinite)
    assert [len(seq.output_ids) for seq in [*good, bad]] == [6, 6, 6, 3]
