"""KV pages that grow: in a pool much too small for all requests, each gets the tokens that it gets alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import policies
from generate.cpu.linear import kernel_runs
from generate.gpu.runner import GpuRunner
from generate.params import GREEDY, SamplingParams
from generate.runner import ModelRunner
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from tests.support import points
from tests.support.generate import SHAPES, Counting, make_model

CONFIG = SHAPES["heads of 64"]
PAGE_SIZE, SLOTS = 16, 16
FORMATS: dict[str, tuple[torch.dtype, torch.dtype | None, str]] = {  # of numbers, of pages, and of weights
    "float32": (torch.float32, None, "none"), "bfloat16": (torch.bfloat16, None, "none"),
    "pages of 8 bits": (torch.bfloat16, torch.int8, "none"), "float32, pages of 8 bits": (torch.float32, torch.int8, "none"),
    "int8": (torch.bfloat16, None, "int8"), "int4": (torch.bfloat16, None, "int4"),
}  # fmt: skip


def requests(n: int, seed: int, **sampling: Any) -> list[Sequence]:
    """Return open-ended requests that stop by themselves; half of the prompts begin alike."""
    rng = random.Random(seed)
    result = []
    for i in range(n):
        prompt = [7] * 33 * (i % 2) + [rng.randrange(CONFIG.vocab_size) for _ in range(rng.randrange(1, 24))]
        last = rng.randrange(90, 180)
        seq = Sequence(prompt, CONFIG.block_size - len(prompt), id=str(i), open_ended=True)
        seq.sampling = SamplingParams(**{"seed": i, **sampling})
        seq.stop = lambda token, seq=seq, last=last: "stop" if len(seq.output_ids) >= last else None
        result.append(seq)
    return result


def pages_needed(sequences: list[Sequence]) -> int:
    """Return the pages that the requests that can run at once have at their ends."""
    return sum(sorted(-(-seq.length // PAGE_SIZE) for seq in sequences)[-SLOTS:])


def serve(runner: Any, pages: int, sequences: list[Sequence], **options: Any) -> tuple[list[list[int]], int]:
    """Return the tokens of all requests and the number of preemptions. Each step spends all slots, as is counted here."""
    pool = PagePool(pages, PAGE_SIZE, prefix_cache=options.pop("prefix_cache", True))
    scheduler = Scheduler(policies.get_policy(options.pop("policy", "dynamic"), SLOTS, options), pool, 64)
    for seq in sequences:
        scheduler.add(seq)
    preempted, again = 0, 0.0
    ever: dict[Sequence, int] = {}  # how many of its tokens were ever computed

    def forward(plan: Plan) -> Any:
        nonlocal again
        parts = [max(0, min(n, ever.get(s, 0) - s.computed)) / n for s, n in zip(plan.sequences, plan.counts)]
        again = sum(parts)
        ever.update((s, max(ever.get(s, 0), s.computed + n)) for s, n in zip(plan.sequences, plan.counts))
        return runner.forward(plan)

    while (record := scheduler.step(forward, lambda: 0.0)) is not None:
        preempted += len(record.preempted)
        assert sum(record.slot_steps) == pytest.approx(scheduler.policy.slots)
        assert record.slot_steps.recomputed == pytest.approx(again)
    assert scheduler.is_idle
    assert pool.used == 0
    assert preempted == sum(seq.preemptions for seq in sequences)
    return [seq.output_ids for seq in sequences], preempted


@pytest.mark.parametrize("form", FORMATS)
def test_a_quarter_of_the_pages_changes_no_token(form: str) -> None:
    """In greedy texts and in sampled ones, whether prefixes are shared or not."""
    dtype, kv, quantize = FORMATS[form]
    if quantize != "none" and not kernel_runs(quantize):
        pytest.skip("needs a C compiler")
    alone, crowded = requests(18, 2), requests(18, 2)
    for seq in (*alone[::3], *crowded[::3]):
        seq.sampling = GREEDY
    runner = ModelRunner(make_model(CONFIG, dtype), 400, PAGE_SIZE, kv, quantize)
    expected, none = serve(runner, 400, alone, prefix_cache=False)
    assert none == 0
    few = pages_needed(alone) // 4
    tokens, preemptions = serve(ModelRunner(make_model(CONFIG, dtype), few, PAGE_SIZE, kv, quantize), few, crowded)
    assert tokens == expected
    assert preemptions > 5


@pytest.mark.parametrize(
    "options",
    points(
        1, {"prefix_cache": False}, {"policy": "chunked"}, {"policy": "prefill-first"}, {"policy": "lightllm"},
        {"policy": "baton"}, {"policy": "econoserve"}, {"policy": "dynamic+srpt"}, {"policy": "static"}, {"reserve": "prompt"},
    ),
    ids=str,
)  # fmt: skip
def test_no_policy_changes_a_token_when_pages_run_out(options: dict[str, Any]) -> None:
    expected, none = serve(ModelRunner(make_model(CONFIG), 400, PAGE_SIZE), 400, requests(12, 3))
    assert none == 0
    assert serve(ModelRunner(make_model(CONFIG), 45, PAGE_SIZE), 45, requests(12, 3), **options)[0] == expected


@pytest.mark.full
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_step_ahead_on_a_gpu_has_the_pages_that_it_needs(prefix_cache: bool) -> None:
    expected, _ = serve(ModelRunner(make_model(CONFIG), 400, PAGE_SIZE), 400, requests(16, 4))
    runner = GpuRunner(make_model(CONFIG), 60, PAGE_SIZE, capacity=SLOTS)
    assert runner.warm_up()
    tokens, preemptions = serve(runner, 60, requests(16, 4), prefix_cache=prefix_cache)
    assert tokens == expected
    assert preemptions > 2


def test_a_gpu_stays_a_step_ahead_while_pages_grow() -> None:
    runner = GpuRunner(make_model(CONFIG), 400, PAGE_SIZE, capacity=SLOTS)
    sequences = [Sequence([i + 1] * 5, 120, open_ended=True, sampling=SamplingParams(seed=i)) for i in range(4)]
    serve(runner, 400, sequences)
    assert runner.decoder.used_ahead == 119  # all decodes


def test_steps_are_not_packed_again_while_pages_grow() -> None:
    runner = Counting(make_model(CONFIG), 400, PAGE_SIZE)
    sequences = [Sequence([i + 1] * 5, 120, open_ended=True, sampling=SamplingParams(seed=i)) for i in range(4)]
    serve(runner, 400, sequences)
    assert runner.packed == 2  # the prompts and the first decodes


def test_prompts_are_scored_once_although_they_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of requests that grow, and those of requests for scores alone, whose prompts take several steps."""
    monkeypatch.setattr(Policy, "margin", 1)  # requests grow from their first tokens on

    def scored(pages: int) -> tuple[list[Sequence], list[Sequence]]:
        growing, rng = requests(8, 6, logprobs=1, prompt_logprobs=1), random.Random(7)
        silent = [Sequence([rng.randrange(CONFIG.vocab_size) for _ in range(200)], 0, id=f"s{i}") for i in range(6)]
        for seq in (*growing, *silent):
            seq.sampling = seq.sampling or SamplingParams(prompt_logprobs=1)
            seq.hashes = [f"scored {seq.id}".encode()]  # as the server has it: no page is found
        serve(ModelRunner(make_model(CONFIG), pages, PAGE_SIZE), pages, [*growing, *silent])
        return growing, silent

    free, short = scored(400), scored(40)
    for alone, crowded in zip(free, short):
        assert sum(seq.preemptions for seq in crowded) > 0 == sum(seq.preemptions for seq in alone)
        for seq, other in zip(crowded, alone):
            assert [d.token for d in seq.prompt_details] == seq.prompt_ids[1:]
            assert [d.logprob for d in seq.prompt_details] == pytest.approx([d.logprob for d in other.prompt_details])
            assert [d.token for d in seq.details] == seq.output_ids == other.output_ids
    assert {(seq.finish_reason, len(seq.output_ids)) for seq in short[1]} == {("length", 0)}
