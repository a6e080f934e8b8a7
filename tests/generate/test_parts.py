"""The benchmark that says where the time of a step goes changes nothing of the step."""

from __future__ import annotations

import pytest
import torch

from benchmarks import engine, parts
from benchmarks.offline import decoding
from generate.cpu.blocks import CBlocks
from generate.cpu.linear import kernel_runs
from generate.runner import ModelRunner
from tests.generate.test_blocks import SHAPES, network_of
from tests.support.generate import why_no_kernel


@pytest.mark.skipif(not kernel_runs(), reason=why_no_kernel())
def test_the_parts_of_a_step_are_timed_and_its_tokens_stay(one_thread: None) -> None:
    torch.manual_seed(0)
    runner = ModelRunner(network_of(SHAPES["llama"]), 40, 64)
    for pool in (runner.keys, runner.values):
        pool.normal_()
    assert isinstance(runner.blocks, CBlocks)
    before = runner.blocks, runner.head, runner.blocks.model.linear
    plans, timed = engine.repeats(decoding(runner, 4, 20, 0.0)), engine.repeats(decoding(runner, 4, 20, 0.0))
    expected = [runner.forward(next(plans)) for _ in range(3)]
    runner._last = None
    outputs = []
    run = runner.forward
    runner.forward = lambda plan: outputs.append(run(plan)) or outputs[-1]  # type: ignore[method-assign, func-returns-value]
    found = parts.of_steps(runner, timed, 1)
    assert outputs == expected
    (step,) = found
    assert list(step) == [*parts.NAMES]
    assert all(step[name] > 0 for name in ("linear", "attention", "layers", "head"))
    assert (runner.blocks, runner.head, runner.blocks.model.linear) == before
