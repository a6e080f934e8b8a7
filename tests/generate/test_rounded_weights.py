"""Linear layers with rounded weights compute exactly what the same arithmetic in PyTorch does, on every processor.

The weights are bytes with a scale for each row (int8), or in GGUF's blocks.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from generate.cpu import linear
from generate.cpu.declarations import declarations
from generate.cpu.kernels import load_library
from generate.cpu.linear import KernelLinear
from generate.cpu.team import team
from models.gguf.block_matrix import BLOCK, KINDS, BlockMatrix
from tests.support.generate import numbers

GROUP = 64  # inputs with a scale of their own
NEEDED = {  # of /proc/cpuinfo, by compiler flags
    "icelake-server": {"avx512_vnni", "avx512_vbmi2", "gfni"},
    "skylake-avx512": {"avx512bw", "avx512dq", "avx512vl"},
    "x86-64-v3 -mavxvnni": {"avx_vnni", "avx2", "fma"},
    "x86-64-v3": {"avx2", "fma"},
}
ROWS = (1, 2, 3, 4, 5, 6, 7, 12, 15, 16, 17, 31, 33, 64, 193)
every_kind = pytest.mark.parametrize("kind", ["int8", *KINDS])

pytestmark = [
    pytest.mark.skipif(not linear.kernel_runs("int8"), reason="needs a C compiler"),
    pytest.mark.parametrize(
        "way", ["TILES", "FMA"], indirect=True
    ),  # vectors of bytes are the same with and without DOT
    pytest.mark.usefixtures("way"),
]


def layer_of(
    weight: Tensor, bias: Tensor | None, kind: str, activation: str | None = None, **options: Any
) -> KernelLinear:
    """Return a layer of these weights, rounded to this kind."""
    if kind == "int8":
        return KernelLinear(weight.bfloat16(), bias, activation, quantize="int8", **options)
    return KernelLinear(BlockMatrix.of(weight, kind), bias, activation, **options)


def reference(weight: Tensor, bias: Tensor | None, x: Tensor, kind: str) -> Tensor:
    """Return float32 outputs: exact sums of a group's products, scaled and added up in order with one rounding each."""
    y = of_bytes(weight.bfloat16(), x) if kind == "int8" else of_blocks(BlockMatrix.of(weight, kind), x)
    return y if bias is None else y + bias


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole numbers up to 127 and the scale of each row of x."""
    peak = x.abs().amax(-1, keepdim=True)
    inverse = torch.where(peak > 0, torch.full_like(peak, 127) / peak, 0.0)
    return (x * inverse).round(), peak / 127


def of_bytes(weight: Tensor, x: Tensor) -> Tensor:
    more = -weight.shape[1] % GROUP
    w, w_scale = rounded(F.pad(weight.float(), (0, more)))
    groups, scales = rounded(F.pad(x.float(), (0, more)).view(len(x), -1, GROUP))
    sums = torch.zeros(len(x), len(weight))
    for g, (part, scale) in enumerate(zip(groups.unbind(1), scales.unbind(1))):
        products = part.double() @ w[:, g * GROUP : (g + 1) * GROUP].T.double()
        sums = (products * scale.double() + sums.double()).float()
    return sums * w_scale.T


def of_blocks(weight: BlockMatrix, x: Tensor) -> Tensor:
    scales, least, q = parts(weight)
    inputs = F.pad(x.float(), (0, -x.shape[1] % BLOCK)).view(len(x), -1, BLOCK)
    peak = inputs.abs().amax(-1)
    bytes_ = (inputs * torch.full_like(peak, 127).div(peak)[..., None]).round()
    x_scales = peak / 127
    sums = torch.zeros(len(x), len(scales))
    for g in range(inputs.shape[1]):
        products = bytes_[:, g].double() @ q[:, g].T.double()
        scale = x_scales[:, g, None] * scales[None, :, g]
        sums = (products * scale.double() + sums.double()).float()
        if weight.kind == "Q4_1":
            total = x_scales[:, g] * bytes_[:, g].sum(-1)
            sums = (total.double()[:, None] * least[None, :, g].double() + sums.double()).float()
    return sums


def parts(weight: BlockMatrix) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales and minima [n, blocks], and whole numbers [n, blocks, 32]."""
    blocks = weight.data.view(len(weight.data), -1, {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[weight.kind])
    start = 4 if weight.kind == "Q4_1" else 2
    halves = blocks[..., :start].contiguous().view(torch.float16).float()
    rest = blocks[..., start:].contiguous()
    if weight.kind == "Q8_0":
        return halves[..., 0], halves[..., 0], rest.view(torch.int8).float()
    q = torch.cat((rest & 15, rest >> 4), -1).float()
    return halves[..., 0], halves[..., -1], q - 8 if weight.kind == "Q4_0" else q


@every_kind
@pytest.mark.parametrize(("n", "k"), [(192, 128), (1003, 96), (70, 32), (64, 1024), (70, 10), (130, 100)])
def test_outputs_are_those_of_exact_sums_at_every_number_of_rows(n: int, k: int, kind: str) -> None:
    weight, bias = numbers(n, k, seed=1) / k**0.5, numbers(n, seed=2)
    layer = layer_of(weight, bias, kind, wide=True)
    x = numbers(max(ROWS), k, seed=3).bfloat16()
    expected = reference(weight, bias, x, kind)
    for rows in ROWS:
        assert torch.equal(layer(x[:rows].contiguous()), expected[:rows])


@every_kind
def test_workers_that_share_a_panel_compute_what_one_does(kind: str) -> None:
    layer = layer_of(numbers(320, 96, seed=1) / 10, numbers(320, seed=2), kind, wide=True)
    x = numbers(200, 96, seed=3).bfloat16()
    expected = layer(x)
    team().use(2, own=True)
    for rows in (16, 63, 200):
        assert torch.equal(layer(x[:rows].contiguous()), expected[:rows])


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_the_largest_products_are_exact(kind: str, byte: int) -> None:
    weight = BlockMatrix.of(numbers(70, 96, seed=1), kind)
    blocks = weight.data.view(70, 3, -1)
    blocks[..., 4 if kind == "Q4_1" else 2 :] = byte
    x = torch.where(torch.arange(96) % 5 == 0, -3.0, 3.0).repeat(34, 1).bfloat16()
    x[::2] = -x[::2].abs()
    assert torch.equal(KernelLinear(weight, None, wide=True)(x), of_blocks(weight, x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_rounded_and_read_as_the_gguf_package_does_it(kind: str) -> None:
    weight = numbers(70, 96, seed=1)
    blocks = BlockMatrix.of(weight, kind)
    theirs = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(blocks.data, torch.from_numpy(theirs))
    values = gguf.quants.dequantize(theirs, gguf.GGMLQuantizationType[kind])
    assert torch.equal(blocks.dequantized(), torch.from_numpy(values))
    x = torch.eye(96).bfloat16()  # a single number of 32 is rounded to itself
    assert torch.allclose(KernelLinear(blocks, None, wide=True)(x).T, torch.from_numpy(values), rtol=1e-5, atol=1e-6)


@every_kind
@pytest.mark.parametrize(("inner", "k"), [(96, 64), (50, 128), (7, 10)])
def test_a_gate_residual_and_activation_are_fused(inner: int, k: int, kind: str) -> None:
    weight, bias = numbers(2 * inner, k) / k**0.5, numbers(2 * inner, seed=2)
    x, residual = numbers(33, k, seed=3).bfloat16(), numbers(33, 2 * inner, seed=4).bfloat16()
    plain = reference(weight, bias, x, kind)
    gate, up = plain.chunk(2, -1)
    gated = layer_of(weight, bias, kind, gated=True)(x)
    assert torch.allclose(gated.float(), F.silu(gate) * up, atol=1e-3, rtol=0.01)
    layer = layer_of(weight, bias, kind, "gelu_new")
    assert torch.allclose(layer(x).float(), F.gelu(plain, approximate="tanh"), atol=1e-3, rtol=0.01)
    assert torch.allclose(layer.add(x, residual).float(), plain + residual.float(), atol=0.02, rtol=0.01)


@every_kind
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_changes_no_other(value: float, kind: str) -> None:
    layer = layer_of(numbers(70, 128), None, kind, wide=True)
    x = numbers(40, 128, seed=6).bfloat16()
    clean = layer(x)
    x[7, 100] = value
    spoilt = layer(x)
    assert spoilt[7].isnan().all()
    keep = [i for i in range(40) if i != 7]
    assert torch.equal(spoilt[keep], clean[keep])


@pytest.mark.parametrize("kind", ["int8", "Q4_1"])
def test_rows_and_weights_of_zeros_and_of_the_smallest_numbers_give_zero(kind: str) -> None:
    weight, x = numbers(64, 64), numbers(3, 64, seed=1).bfloat16()
    weight[0], weight[1] = 0, 1e-38
    x[0], x[1] = 0, 1e-38
    found = layer_of(weight, None, kind, wide=True)(x)
    assert not found[:2].any()
    assert not found[:, :2].any()
    assert found[2, 2:].all()


@pytest.mark.parametrize(("name", "memory", "error"), [("int8", 0.51, 0.02), ("int4", 1 / 3, 0.1)])
def test_rounded_weights_take_less_memory_and_are_near_the_weights_as_they_were(
    name: str, memory: float, error: float
) -> None:
    weight, x = (numbers(256, 576, seed=1) / 24).bfloat16(), numbers(16, 576, seed=3).bfloat16()
    plain, small = (KernelLinear(weight, None, wide=True, quantize=quantize) for quantize in ("none", name))
    assert small.packed.nbytes < memory * plain.packed.nbytes
    true = F.linear(x.float(), weight.float())
    assert (small(x) - true).norm() < error * true.norm()


@pytest.mark.full
@pytest.mark.skipif(platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(), reason="needs x86-64 Linux")
@pytest.mark.parametrize("flags", NEEDED)
def test_every_kind_of_processor_computes_the_same_bits(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = (numbers(100, 576, seed=1) / 24).bfloat16(), numbers(100, seed=2)
    x = numbers(17, 576, seed=3).bfloat16()
    expected = KernelLinear(weight, bias, wide=True, quantize="int8")(x)
    if missing := NEEDED[flags] - set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip(f"needs a processor with {', '.join(missing)}")
    library = load_library(linear.SOURCE, [f"-march={flags.split()[0]}", *flags.split()[1:], *linear.UNFUSED])
    monkeypatch.setattr(linear, "_library", lambda: declarations().apply(library))
    assert torch.equal(KernelLinear(weight, bias, wide=True, quantize="int8")(x), expected)
