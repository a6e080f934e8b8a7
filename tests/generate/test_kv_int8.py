"""Keys and values in 8 bits: the C kernel against the oracle, its bits, its scales, and a whole model on it."""

from __future__ import annotations

import math
import random

import pytest
import torch
from test_growing_kv import CONFIG, PAGE_SIZE, requests, serve
from torch import Tensor
from torch.nn import functional as F

from generate import machine
from generate.cpu.attention import CAttention, TorchAttention, dequantize, quantize
from generate.runner import ModelRunner
from tests.support.generate import NAN, World, assert_close, logits_of, make_model, need_compiler, pieces

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SHAPES = [(4, 4, 64, 64), (9, 3, 64, 16), (4, 2, 128, 64), (3, 1, 80, 16), (2, 2, 5, 16), (16, 1, 24, 32)]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def kernel(dtype: torch.dtype) -> CAttention:
    need_compiler()
    return CAttention(dtype, torch.int8)


def world(lengths: list[int], shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int = 0) -> World:
    H, KV, D, P = shape
    return World(lengths, H, D, P, dtype, seed, KV, torch.int8)


@BOTH
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_lengths_and_pages_agree_with_attention_to_the_dequantized_rows(
    kernel: CAttention, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    H, KV, D, _ = shape
    rng = random.Random(str(shape))
    lengths = [1, 16, *(rng.randrange(2, 330) for _ in range(4))]
    case = world(lengths, shape, dtype)
    steps = pieces(lengths, D)
    got = case.run(kernel, steps, padding=1)
    assert_close(got, case.run(TorchAttention(), steps), dtype, torch.int8)
    for rows, tokens in zip(got, case.tokens):
        heads = tokens.view(len(tokens), H + 2 * KV, D).transpose(0, 1)[None]
        past = [dequantize(quantize(part)) for part in (heads[:, H : H + KV], heads[:, H + KV :])]
        y = F.scaled_dot_product_attention(heads[:, :H].float(), *past, is_causal=True, enable_gqa=True)
        assert_close([rows], [y[0].transpose(0, 1).reshape(len(tokens), H * D)], dtype, torch.int8)


@BOTH
def test_a_row_has_the_same_bits_alone_and_among_64(kernel: CAttention, dtype: torch.dtype) -> None:
    lengths = [random.Random(i).randrange(2, 200) for i in range(64)]
    case = world(lengths, (6, 2, 64, 16), dtype)
    case.run(kernel, [{i: n - 1 for i, n in enumerate(lengths)}])
    together = case.step(kernel, dict.fromkeys(range(64), 1))
    for i in (0, 31, 63):
        case.done[i] -= 1
        assert torch.equal(case.step(kernel, {i: 1})[i], together[i])


@BOTH
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("attention", ["c", "torch"])
def test_what_is_not_finite_makes_its_own_sequence_nan(
    kernel: CAttention, dtype: torch.dtype, value: float, attention: str
) -> None:
    one = kernel if attention == "c" else TorchAttention()
    clean = world([40, 41, 42], (2, 2, 64, 16), dtype).run(one, [{0: 40, 1: 40, 2: 42}, {1: 1}])
    for column in (2 * 64, 4 * 64 + 5):  # a key's, a value's
        case = world([40, 41, 42], (2, 2, 64, 16), dtype)
        case.tokens[1][40, column] = value
        poisoned = case.run(one, [{0: 40, 1: 40, 2: 42}, {1: 1}])
        assert poisoned[1][40].view(2, 64)[0].isnan().all()
        assert torch.equal(poisoned[1][:40], clean[1][:40])
        assert torch.equal(poisoned[0], clean[0])
        assert torch.equal(poisoned[2], clean[2])


@BOTH
def test_rows_of_zeros_and_of_huge_numbers_keep_their_values(kernel: CAttention, dtype: torch.dtype) -> None:
    for factor in (0.0, 1e-35, 1e30):
        case = world([20], (2, 2, 64, 16), dtype)
        case.tokens[0][:, 4 * 64 :] *= factor  # values
        rows = case.run(kernel, [{0: 20}])[0].float()
        expected = case.run(TorchAttention(), [{0: 20}])[0].float()
        assert rows.isfinite().all()
        torch.testing.assert_close(rows, expected, rtol=0.02, atol=2e-2 * factor)


def test_a_row_is_quantized_to_half_a_step() -> None:
    x = torch.randn(50, 3, 80)
    error = (dequantize(quantize(x)) - x).abs()
    assert (error <= x.abs().amax(-1, keepdim=True) / 127 * 0.501).all()
    assert quantize(x).shape == (50, 3, 84)


@BOTH
def test_preemption_and_shared_prefixes_keep_each_requests_tokens(dtype: torch.dtype) -> None:
    pages = 45
    alone = requests(12, 3, temperature=1.0)
    runner = ModelRunner(make_model(CONFIG, dtype), 400, PAGE_SIZE, torch.int8)
    expected, none = serve(runner, 400, alone, prefix_cache=False)
    assert none == 0
    crowded = ModelRunner(make_model(CONFIG, dtype), pages, PAGE_SIZE, torch.int8)
    tokens, preemptions = serve(crowded, pages, requests(12, 3, temperature=1.0))
    assert preemptions > 0
    assert tokens == expected


@BOTH
@pytest.mark.parametrize("kernels_are", ["on", "off"])
def test_logits_are_close_to_those_of_the_models_own_format(
    dtype: torch.dtype, kernels_are: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels_are == "off":
        monkeypatch.setenv("EB_KERNELS", "off")

    def logits(kv_dtype: torch.dtype) -> Tensor:
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
