"""Models whose weights are rounded: every family keeps its tokens in any batch, and what cannot run is refused by name."""

from __future__ import annotations

import pytest
import torch
from test_growing_kv import CONFIG, PAGE_SIZE, requests, serve

from generate import machine, quantize
from generate.cpu import linear
from generate.cpu.blocks import CBlocks
from generate.machine import MachineError
from generate.quantize import QuantizeError
from generate.runner import ModelRunner
from tests.support.generate import ARCHITECTURES, logits_of, make_model, random_network

CPU = torch.device("cpu")
FORMATS = [name for name in linear.FORMATS if name != "none"]

pytestmark = [
    pytest.mark.skipif(not linear.kernel_runs("int8"), reason="needs a C compiler"),
    pytest.mark.usefixtures("one_thread"),
]


def runner_of(name: str, format: str) -> ModelRunner:
    return ModelRunner(random_network(ARCHITECTURES[name], torch.bfloat16), 40, PAGE_SIZE, None, format)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("threads", [1, 3])
def test_every_family_gives_a_row_the_same_bits_alone_and_among_others(name: str, format: str, threads: int) -> None:
    torch.set_num_threads(threads)
    runner = runner_of(name, format)
    assert isinstance(runner.blocks, CBlocks)
    prompts = [
        [31 * i % runner.config.vocab_size for i in range(n, n + length)] for n, length in enumerate((1, 40, 7, 16, 1))
    ]
    for prompt, among in zip(prompts, logits_of(runner, prompts)):
        assert torch.equal(logits_of(runner, [prompt])[0], among)


@pytest.mark.parametrize("format", FORMATS)
def test_logits_are_near_those_of_the_weights_as_they_were(format: str) -> None:
    name = "llama, 3 heads to 1"
    prompt = [31 * i % 211 for i in range(40)]
    true, found = (logits_of(runner_of(name, each), [prompt])[0].softmax(-1) for each in ("none", format))
    assert 0 < (found - true).abs().sum(-1).mean() < (0.15 if format == "int8" else 0.8)


@pytest.mark.parametrize("format", FORMATS)
def test_requests_that_are_preempted_and_share_prefixes_keep_their_tokens(format: str) -> None:
    alone = requests(8, 3, temperature=1.0)
    runner = ModelRunner(make_model(CONFIG, torch.bfloat16), 400, PAGE_SIZE, None, format)
    expected = [serve(runner, 400, [seq], prefix_cache=False)[0][0] for seq in alone]
    crowded = ModelRunner(make_model(CONFIG, torch.bfloat16), 45, PAGE_SIZE, None, format)
    tokens, _ = serve(crowded, 45, requests(8, 3, temperature=1.0))
    assert tokens == expected


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("part", ["qkv", "attn_proj", "fc", "mlp_proj", "head"])
def test_a_weight_that_is_not_finite_is_refused_by_name(part: str, format: str) -> None:
    network = random_network(ARCHITECTURES["llama, 1 to 1, own head"], torch.bfloat16)
    weight = network.head if part == "head" else getattr(network.blocks[1], part).weight
    weight[3, 5] = float("nan")
    with pytest.raises(QuantizeError, match=part if part == "head" else f"layer 1's {part}"):
        ModelRunner(network, 4, PAGE_SIZE, None, format)


@pytest.mark.parametrize("format", FORMATS)
def test_what_cannot_run_is_refused_with_what_can(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineError, match=f"--quantize {format} is for CPUs"):
        quantize.check(format, torch.bfloat16, torch.device("cuda"))
    with pytest.raises(MachineError, match="--dtype bfloat16"):
        ModelRunner(make_model(CONFIG), 4, PAGE_SIZE, None, format)
    monkeypatch.setattr(quantize, "kernel_runs", lambda name: False)
    with pytest.raises(MachineError, match="Use none"):
        quantize.check(format, torch.bfloat16, CPU)
    quantize.check("none", torch.float32, CPU)


def test_a_processor_without_bfloat16_takes_it_beside_rounded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "bfloat16_is_faster", lambda: False)
    assert machine.choose_dtype("auto", CPU) == torch.float32
    assert machine.choose_dtype("auto", CPU, quantize="int8") == torch.bfloat16
