"""Models whose weights, keys or values are rounded: their bits in any batch, their distance, and what is refused by name."""

from __future__ import annotations

import pytest
import torch
from test_growing_kv import CONFIG, PAGE_SIZE

from generate import machine, quantize
from generate.cpu import linear
from generate.cpu.blocks import CBlocks
from generate.cpu.team import team
from generate.machine import MachineError
from generate.quantize import QuantizeError
from generate.runner import ModelRunner
from tests.generate import test_blocks
from tests.support.generate import ARCHITECTURES, logits_of, make_model, random_network

CPU = torch.device("cpu")
SHAPES = {**test_blocks.SHAPES, **ARCHITECTURES}
FORMATS = [name for name in linear.FORMATS if name != "none"]

pytestmark = [
    pytest.mark.skipif(not linear.kernel_runs("int8"), reason="needs a C compiler"),
    pytest.mark.usefixtures("one_thread"),
]


def runner_of(name: str, format: str) -> ModelRunner:
    return ModelRunner(random_network(SHAPES[name], torch.bfloat16), 40, PAGE_SIZE, None, format)


@pytest.mark.parametrize("format", linear.FORMATS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_family_gives_a_row_the_same_bits_alone_and_among_others_with_helpers(name: str, format: str) -> None:
    runner = runner_of(name, format)
    assert isinstance(runner.blocks, CBlocks)
    prompts = [
        [31 * i % runner.config.vocab_size for i in range(n, n + length)] for n, length in enumerate((1, 40, 7, 16, 1))
    ]
    together = logits_of(runner, prompts)
    team().use(3, own=True)
    for others in (logits_of(runner, prompts), [logits_of(runner, [prompt])[0] for prompt in prompts]):
        assert all(torch.equal(one, other) for one, other in zip(others, together, strict=True))


@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_that_is_not_finite_is_refused_by_name(format: str) -> None:
    for part in ("qkv", "attn_proj", "fc", "mlp_proj", "head"):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernels_are", ["on", "off"])
def test_logits_with_pages_of_8_bits_are_close_to_those_of_the_models_own_format(
    dtype: torch.dtype, kernels_are: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels_are == "off":
        monkeypatch.setenv("EB_KERNELS", "off")

    def logits(kv_dtype: torch.dtype) -> torch.Tensor:
        runner = ModelRunner(make_model(CONFIG, dtype), 40, PAGE_SIZE, kv_dtype)
        return logits_of(runner, [[31 * i % CONFIG.vocab_size for i in range(90)]])[0]

    own, small = logits(dtype), logits(torch.int8)
    assert (small.softmax(-1) - own.softmax(-1)).abs().sum(-1).max() < 0.05
    assert not torch.equal(small, own)


def test_a_model_holds_about_twice_the_tokens_in_the_same_memory() -> None:
    shape, cpu, memory = make_model(CONFIG).config.architecture, torch.device("cpu"), 1 << 24
    tokens = {
        dtype: machine.kv_pages(shape, dtype, cpu, memory, 1) - 1
        for dtype in (torch.float32, torch.bfloat16, torch.int8)
    }
    assert 1.85 < tokens[torch.int8] / tokens[torch.bfloat16] < 2
    assert 3.7 < tokens[torch.int8] / tokens[torch.float32] < 4


def test_a_gpu_refuses_8_bits_by_name() -> None:
    with pytest.raises(machine.MachineError, match="--kv-dtype int8 is for CPUs"):
        machine.choose_kv_dtype("int8", torch.float16, torch.device("cuda"))
    assert machine.choose_kv_dtype("auto", torch.float16, torch.device("cuda")) == torch.float16
    assert machine.choose_kv_dtype("int8", torch.float32, torch.device("cpu")) == torch.int8
