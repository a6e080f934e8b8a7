"""Linear layers with weights of 8 bits compute exactly what the same arithmetic in PyTorch does, on every processor."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from generate.cpu import linear
from generate.cpu.declarations import declarations
from generate.cpu.kernels import load_library
from generate.cpu.linear import KernelLinear

GROUP = 64  # inputs with a scale of their own
NEEDED = {  # of /proc/cpuinfo, by compiler flags
    "icelake-server": {"avx512_vnni", "avx512_vbmi2", "gfni"},
    "skylake-avx512": {"avx512bw", "avx512dq", "avx512vl"},
    "x86-64-v3 -mavxvnni": {"avx_vnni", "avx2", "fma"},
    "x86-64-v3": {"avx2", "fma"},
}
ROWS = (1, 2, 3, 4, 5, 6, 7, 12, 15, 16, 17, 31, 33, 64, 193)

pytestmark = pytest.mark.skipif(not linear.kernel_runs("int8"), reason="needs a C compiler")


@pytest.fixture(params=["TILES", "FMA"], ids=["tiles", "vectors"], autouse=True)
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compute with AMX's tiles, where there are such, and with vectors."""
    library, constants = linear._library(), linear.declarations().constants
    way = constants[request.param]
    if not library.packed_linear_has(way):
        pytest.skip("needs a processor with AMX, and a system that lets it be used")
    library.packed_linear_use(way)
    yield
    library.packed_linear_use(constants[linear.bfloat16_way().upper()])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole numbers up to 127 and the scale of each row of x."""
    peak = x.abs().amax(-1, keepdim=True)
    inverse = torch.where(peak > 0, torch.full_like(peak, 127) / peak, 0.0)
    return (x * inverse).round(), peak / 127


def reference(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Return float32 outputs: exact sums of 64 products, added up in their order with one rounding each."""
    more = -weight.shape[1] % GROUP
    w, w_scale = rounded(F.pad(weight.float(), (0, more)))
    groups, scales = rounded(F.pad(x.float(), (0, more)).view(len(x), -1, GROUP))
    sums = torch.zeros(len(x), len(weight))
    for g, (part, scale) in enumerate(zip(groups.unbind(1), scales.unbind(1))):
        products = part.double() @ w[:, g * GROUP : (g + 1) * GROUP].T.double()
        sums = (products * scale.double() + sums.double()).float()
    y = sums * w_scale.T
    return y if bias is None else y + bias


@pytest.mark.parametrize(("n", "k"), [(192, 128), (100, 64), (1003, 576), (64, 1024), (70, 10), (130, 100)])
def test_outputs_are_those_of_exact_sums_at_every_number_of_rows(n: int, k: int) -> None:
    weight, bias = (numbers(n, k, seed=1) / k**0.5).bfloat16(), numbers(n, seed=2)
    layer = KernelLinear(weight, bias, wide=True, quantize="int8")
    x = numbers(max(ROWS), k, seed=3).bfloat16()
    expected = reference(weight, bias, x)
    for rows in ROWS:
        assert torch.equal(layer(x[:rows].contiguous()), expected[:rows])


def test_outputs_are_near_those_of_the_weights_as_they_were() -> None:
    weight, x = (numbers(256, 576, seed=1) / 24).bfloat16(), numbers(16, 576, seed=3).bfloat16()
    true = F.linear(x.float(), weight.float())
    error = KernelLinear(weight, None, wide=True, quantize="int8")(x) - true
    assert error.norm() < 0.02 * true.norm()


@pytest.mark.parametrize(("inner", "k"), [(96, 64), (50, 128), (7, 10)])
def test_a_gate_residual_and_activation_are_fused(inner: int, k: int) -> None:
    weight, bias = (numbers(2 * inner, k) / k**0.5).bfloat16(), numbers(2 * inner, seed=2)
    x, residual = numbers(17, k, seed=3).bfloat16(), numbers(17, 2 * inner, seed=4).bfloat16()
    plain = reference(weight, bias, x)
    gate, up = plain.chunk(2, -1)
    gated = KernelLinear(weight, bias, gated=True, quantize="int8")(x)
    assert torch.allclose(gated.float(), F.silu(gate) * up, atol=1e-3, rtol=0.01)
    layer = KernelLinear(weight, bias, "gelu_new", quantize="int8")
    assert torch.allclose(layer(x).float(), F.gelu(plain, approximate="tanh"), atol=1e-3, rtol=0.01)
    assert torch.allclose(layer.add(x, residual).float(), plain + residual.float(), atol=0.02, rtol=0.01)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_changes_no_other(value: float) -> None:
    layer = KernelLinear(numbers(70, 128).bfloat16(), None, wide=True, quantize="int8")
    x = numbers(20, 128, seed=6).bfloat16()
    clean = layer(x)
    x[7, 100] = value
    spoilt = layer(x)
    assert spoilt[7].isnan().all()
    keep = [i for i in range(20) if i != 7]
    assert torch.equal(spoilt[keep], clean[keep])


def test_rows_and_weights_of_zeros_and_of_the_smallest_numbers_give_zero() -> None:
    weight, x = numbers(64, 64).bfloat16(), numbers(3, 64, seed=1).bfloat16()
    weight[0], weight[1] = 0, 1e-38
    x[0], x[1] = 0, 1e-38
    found = KernelLinear(weight, None, wide=True, quantize="int8")(x)
    assert not found[:2].any()
    assert not found[:, :2].any()
    assert found[2, 2:].all()


def test_packed_weights_take_half_the_memory() -> None:
    weight = numbers(256, 576).bfloat16()
    plain, small = (KernelLinear(weight, None, quantize=name).packed.nbytes for name in ("none", "int8"))
    assert small < 0.51 * plain


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
