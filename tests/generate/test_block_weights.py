"""Linear layers with weights in GGUF's blocks compute exactly what the same arithmetic in PyTorch does."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from generate.cpu import linear
from generate.cpu.declarations import declarations
from generate.cpu.linear import KernelLinear
from models.gguf.block_matrix import BLOCK, KINDS, BlockMatrix

ROWS = (1, 2, 3, 4, 5, 6, 7, 15, 16, 17, 31, 33, 64, 193)
WAYS = ("TILES", "DOT", "FMA")

pytestmark = pytest.mark.skipif(not linear.kernel_runs("int4"), reason="needs a C compiler")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["TILES", "FMA"], ids=["tiles", "vectors"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compute with AMX's tiles, where there are such, and with vectors."""
    library, ways = linear._library(), declarations().constants
    before = next(name for name in WAYS if library.packed_linear_has(ways[name]))
    if not library.packed_linear_has(ways[request.param]):
        pytest.skip("needs a processor with AMX, and a system that lets it be used")
    library.packed_linear_use(ways[request.param])
    yield
    library.packed_linear_use(ways[before])


def reference(weight: BlockMatrix, bias: Tensor | None, x: Tensor) -> Tensor:
    """Return float32 outputs: exact sums of 32 products, scaled and added up in their order with one rounding each."""
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
    return sums if bias is None else sums + bias


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


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(192, 128), (1003, 96), (70, 32), (64, 800), (130, 100)])
def test_outputs_are_those_of_exact_sums_at_every_number_of_rows(n: int, k: int, kind: str) -> None:
    weight, bias = BlockMatrix.of(numbers(n, k, seed=1) / k**0.5, kind), numbers(n, seed=2)
    layer = KernelLinear(weight, bias, wide=True)
    x = numbers(max(ROWS), k, seed=3).bfloat16()
    expected = reference(weight, bias, x)
    for rows in ROWS:
        assert torch.equal(layer(x[:rows].contiguous()), expected[:rows])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_the_largest_products_are_exact(kind: str, byte: int) -> None:
    weight = BlockMatrix.of(numbers(70, 96, seed=1), kind)
    blocks = weight.data.view(70, 3, -1)
    blocks[..., 4 if kind == "Q4_1" else 2 :] = byte
    x = torch.where(torch.arange(96) % 5 == 0, -3.0, 3.0).repeat(34, 1).bfloat16()
    x[::2] = -x[::2].abs()
    assert torch.equal(KernelLinear(weight, None, wide=True)(x), reference(weight, None, x))


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


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("inner", "k"), [(96, 64), (50, 128)])
def test_a_gate_residual_and_activation_are_fused(inner: int, k: int, kind: str) -> None:
    weight, bias = BlockMatrix.of(numbers(2 * inner, k) / k**0.5, kind), numbers(2 * inner, seed=2)
    x, residual = numbers(33, k, seed=3).bfloat16(), numbers(33, 2 * inner, seed=4).bfloat16()
    plain = reference(weight, bias, x)
    gate, up = plain.chunk(2, -1)
    gated = KernelLinear(weight, bias, gated=True)(x)
    assert torch.allclose(gated.float(), F.silu(gate) * up, atol=1e-3, rtol=0.01)
    layer = KernelLinear(weight, bias, "gelu_new")
    assert torch.allclose(layer(x).float(), F.gelu(plain, approximate="tanh"), atol=1e-3, rtol=0.01)
    assert torch.allclose(layer.add(x, residual).float(), plain + residual.float(), atol=0.02, rtol=0.01)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_changes_no_other(value: float, kind: str) -> None:
    layer = KernelLinear(BlockMatrix.of(numbers(70, 128), kind), None, wide=True)
    x = numbers(40, 128, seed=6).bfloat16()
    clean = layer(x)
    x[7, 100] = value
    spoilt = layer(x)
    assert spoilt[7].isnan().all()
    keep = [i for i in range(40) if i != 7]
    assert torch.equal(spoilt[keep], clean[keep])


def test_rows_and_weights_of_zeros_and_of_the_smallest_numbers_give_zero() -> None:
    weight, x = numbers(64, 64), numbers(3, 64, seed=1).bfloat16()
    weight[0], weight[1] = 0, 1e-38
    x[0], x[1] = 0, 1e-38
    found = KernelLinear(BlockMatrix.of(weight, "Q4_1"), None, wide=True)(x)
    assert not found[:2].any()
    assert not found[:, :2].any()
    assert found[2, 2:].all()


def test_int4_takes_a_third_of_the_memory_and_is_near_the_weight_as_it_was() -> None:
    weight, x = (numbers(256, 576, seed=1) / 24).bfloat16(), numbers(16, 576, seed=3).bfloat16()
    plain, small = (KernelLinear(weight, None, wide=True, quantize=name) for name in ("none", "int4"))
    assert small.packed.nbytes < plain.packed.nbytes / 3
    assert (small(x) - plain(x)).norm() < 0.1 * plain(x).norm()
