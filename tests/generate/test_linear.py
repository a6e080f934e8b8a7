"""The linear layers in every format of weights and every way to multiply: the same arithmetic as PyTorch's, and a row's
numbers do not depend on how many rows there are.

Weights are bfloat16 ("none"), bytes with a scale for each row ("int8"), or in GGUF's blocks.
"""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
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
from generate.cpu.linear import KernelLinear, Linear, PackedLinear, evenly, make_head, make_linear, round_rows
from generate.cpu.team import team
from models.activations import ACTIVATIONS
from models.gguf.block_matrix import BLOCK, KINDS, BlockMatrix
from tests.support.generate import numbers

GROUP = 64  # inputs with a scale of their own
NEEDED = {  # of /proc/cpuinfo, by compiler flags
    "icelake-server": {"avx512_vnni", "avx512_vbmi2", "gfni"},
    "skylake-avx512": {"avx512bw", "avx512dq", "avx512vl"},
    "x86-64-v3 -mavxvnni": {"avx_vnni", "avx2", "fma"},
    "x86-64-v3": {"avx2", "fma"},
}
ROWS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 15, 16, 17, 31, 33, 64, 191, 193, 400)
BYTES = ("int8", *KINDS)
FORMATS = [("none", way) for way in ("TILES", "DOT", "FMA")]
FORMATS += [(kind, way) for kind in BYTES for way in ("TILES", "FMA")]  # vectors of bytes are the same with DOT

pytestmark = pytest.mark.usefixtures("one_thread")
needs_kernel = pytest.mark.skipif(not linear.kernel_runs("int8"), reason="needs a C compiler")
every_format = pytest.mark.parametrize(("kind", "way"), FORMATS, indirect=["way"])


def layer_of(
    weight: Tensor, bias: Tensor | None, kind: str, activation: str | None = None, **options: Any
) -> KernelLinear:
    """Return a layer of these weights in this format."""
    if kind in linear.FORMATS:
        return KernelLinear(weight.bfloat16(), bias, activation, quantize=kind, **options)
    return KernelLinear(BlockMatrix.of(weight, kind), bias, activation, **options)


def reference(weight: Tensor, bias: Tensor | None, x: Tensor, kind: str) -> Tensor:
    """Return float32 outputs: exact sums of a group's products, scaled and added up in order with one rounding each."""
    if kind == "none":
        y = F.linear(x.float(), weight.bfloat16().float())
    else:
        y = of_bytes(weight.bfloat16(), x) if kind == "int8" else of_blocks(BlockMatrix.of(weight, kind), x)
    return y if bias is None else y + bias.float()


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


@needs_kernel
@pytest.mark.usefixtures("way")
@every_format
@pytest.mark.parametrize(("n", "k"), [(192, 128), (1003, 96), (70, 32), (64, 1024), (70, 10), (130, 100)])
def test_outputs_are_those_of_exact_sums_at_every_number_of_rows_and_with_helpers(n: int, k: int, kind: str) -> None:
    weight, bias = numbers(n, k, seed=1) / k**0.5, numbers(n, seed=2).bfloat16()
    layer = layer_of(weight, bias, kind, wide=True)
    x = numbers(max(ROWS), k, seed=3).bfloat16()
    expected, found = reference(weight, bias, x, kind), layer(x)
    assert (found - expected).abs().max() < 1e-4 if kind == "none" else torch.equal(found, expected)
    for rows in ROWS:
        assert torch.equal(layer(x[:rows].contiguous()), found[:rows])
    team().use(2, own=True)
    for rows in (16, 63, 200):
        assert torch.equal(layer(x[:rows].contiguous()), found[:rows])


@needs_kernel
@pytest.mark.usefixtures("way")
@every_format
@pytest.mark.parametrize(("inner", "k"), [(96, 64), (50, 128), (7, 10)])
def test_a_gate_residual_and_activation_are_fused(inner: int, k: int, kind: str) -> None:
    weight, bias = numbers(2 * inner, k) / k**0.5, numbers(2 * inner, seed=2).bfloat16()
    x, residual = numbers(193, k, seed=3).bfloat16(), numbers(193, 2 * inner, seed=4).bfloat16()
    atol = 0.01 if kind == "none" else 1e-3
    for given in (bias, None):
        plain = reference(weight, given, x, kind)
        gate, up = plain.chunk(2, -1)
        layer = layer_of(weight, given, kind, gated=True)
        gated = layer(x)
        assert torch.allclose(gated.float(), F.silu(gate) * up, atol=atol, rtol=0.01)
        for rows in (4, 16, 17, 40):
            assert torch.equal(layer(x[:rows].contiguous()), gated[:rows])
    plain = reference(weight, bias, x, kind)
    for activation, active in (
        ("gelu_new", F.gelu(plain, approximate="tanh")), ("gelu", F.gelu(plain)), ("relu", plain.relu())
    ):  # fmt: skip
        found = layer_of(weight, bias, kind, activation)(x).float()
        assert torch.allclose(found, active, atol=2 * atol, rtol=0.01)
    added = layer_of(weight, bias, kind).add(x, residual).float()
    assert torch.allclose(added, plain + residual.float(), atol=0.02, rtol=0.01)


@needs_kernel
@pytest.mark.usefixtures("way")
@every_format
def test_a_row_that_is_not_finite_changes_no_other(kind: str) -> None:
    layer = layer_of(numbers(70, 128), None, kind, wide=True)
    x = numbers(40, 128, seed=6).bfloat16()
    clean = layer(x)
    for value in (float("nan"), float("inf"), float("-inf")):
        x[7, 100] = value
        spoilt = layer(x)
        assert not spoilt[7].isfinite().any()
        keep = [i for i in range(40) if i != 7]
        assert torch.equal(spoilt[keep], clean[keep])


@needs_kernel
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("way", ["TILES", "FMA"], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_the_largest_products_are_exact(kind: str) -> None:
    weight = BlockMatrix.of(numbers(70, 96, seed=1), kind)
    blocks = weight.data.view(70, 3, -1)
    x = torch.where(torch.arange(96) % 5 == 0, -3.0, 3.0).repeat(34, 1).bfloat16()
    x[::2] = -x[::2].abs()
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        blocks[..., 4 if kind == "Q4_1" else 2 :] = byte
        assert torch.equal(KernelLinear(weight, None, wide=True)(x), of_blocks(weight, x))


@needs_kernel
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


@needs_kernel
@pytest.mark.usefixtures("way")
def test_a_residual_is_added_once_in_place() -> None:
    layer = KernelLinear((numbers(70, 96) / 12).bfloat16(), numbers(70).bfloat16())
    for rows in (1, 5, 16, 17, 40, 193, 200):
        x, residual = numbers(rows, 96, seed=4).bfloat16(), numbers(rows, 70, seed=5).bfloat16()
        expected = layer.add(x, residual)
        pointers = x.data_ptr(), residual.data_ptr(), residual.data_ptr()
        layer.library.packed_linear(ctypes.byref(layer.struct), *pointers, rows, layer.plain, None, None)
        assert torch.equal(residual, expected)


@needs_kernel
@pytest.mark.usefixtures("way")
def test_gelu_is_right_at_its_ends_and_keeps_values_that_are_not_finite() -> None:
    weight = torch.zeros(64, 2).bfloat16()
    weight[:, 0] = 1
    for value in (float("nan"), float("inf"), -1e30, 1e30, -50.0, 50.0):
        x = torch.tensor([[value, 0.0]]).bfloat16()
        for activation, form in (("gelu_new", "tanh"), ("gelu", "none")):
            expected = F.gelu(x[:, :1].float(), approximate=form).expand(1, 64)
            assert torch.allclose(
                KernelLinear(weight, None, activation)(x).float(), expected, rtol=0.01, equal_nan=True
            )


@needs_kernel
def test_gelus_erf_form_is_right_to_the_last_bits() -> None:
    x = torch.linspace(-6, 6, 4096).bfloat16()
    weight = torch.zeros(64, 2).bfloat16()
    weight[:, 0] = 1
    found = KernelLinear(weight, None, "gelu")(F.pad(x[:, None], (0, 1)))[:, 0].float()
    expected = F.gelu(x.double())
    assert ((found - expected).abs() <= 2**-8 * expected.abs() + 4e-7).all()


@needs_kernel
@pytest.mark.parametrize("kind", ["int8", "Q4_1"])
def test_rows_and_weights_of_zeros_and_of_the_smallest_numbers_give_zero(kind: str) -> None:
    weight, x = numbers(64, 64), numbers(3, 64, seed=1).bfloat16()
    weight[0], weight[1] = 0, 1e-38
    x[0], x[1] = 0, 1e-38
    found = layer_of(weight, None, kind, wide=True)(x)
    assert not found[:2].any()
    assert not found[:, :2].any()
    assert found[2, 2:].all()


@needs_kernel
@pytest.mark.parametrize(("name", "memory", "error"), [("int8", 0.51, 0.02), ("int4", 1 / 3, 0.1)])
def test_rounded_weights_take_less_memory_and_are_near_the_weights_as_they_were(
    name: str, memory: float, error: float
) -> None:
    weight, x = (numbers(256, 576, seed=1) / 24).bfloat16(), numbers(16, 576, seed=3).bfloat16()
    plain, small = (KernelLinear(weight, None, wide=True, quantize=quantize) for quantize in ("none", name))
    assert small.packed.nbytes < memory * plain.packed.nbytes
    true = F.linear(x.float(), weight.float())
    assert (small(x) - true).norm() < error * true.norm()


@needs_kernel
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


@pytest.mark.parametrize("activation", [None, "gelu_new", "gelu", "relu", "silu"])
def test_the_packed_layer_agrees_for_one_row_and_for_many(activation: str | None) -> None:
    weight, bias = numbers(96, 64) / 8, numbers(96, seed=7)
    packed, plain = PackedLinear(weight, bias, activation), Linear(weight, bias, activation)
    x, residual = numbers(17, 64, seed=8), numbers(17, 96, seed=9)
    whole = packed(x)
    assert torch.allclose(whole, plain(x), atol=1e-5)
    assert torch.allclose(packed.add(x, residual), F.linear(x, weight, bias) + residual, atol=1e-5)
    assert torch.equal(packed(x[:1]), whole[:1])
    assert torch.equal(packed.add(x[:1], residual[:1]), packed.add(x, residual)[:1])


def test_a_float32_row_has_the_same_bits_alone_and_among_others() -> None:
    layer, x = make_linear(numbers(300, 96), numbers(300, seed=1)), numbers(80, 96, seed=2)
    alone = torch.cat([layer(row[None]) for row in x])
    assert all(torch.equal(layer(x[:rows]), alone[:rows]) for rows in (2, 3, 7, 16, 33, 64, 80))


@pytest.mark.parametrize("name", ["silu", "gelu_new", "tanh"])
@pytest.mark.parametrize(("width", "rows"), [(80, 7), (17, 64), (1536, 512)])
def test_an_activation_gives_a_row_the_same_bits_alone_and_among_others(name: str, width: int, rows: int) -> None:
    activate, x = evenly(ACTIVATIONS[name]), torch.randn(rows, width) * 3
    before, threads = activate(x), torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        assert torch.equal(activate(x), before)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(before, torch.cat([activate(row[None]) for row in x]))


def test_onednn_gets_few_numbers_of_rows() -> None:
    rounded = [round_rows(rows) for rows in range(1, 2049)]
    assert all(a <= b for a, b in zip(range(1, 2049), rounded))
    assert all(b <= 1.25 * a + 7 for a, b in zip(range(1, 2049), rounded))
    assert len({*rounded}) < 40


def test_a_head_gives_float32_without_any_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = numbers(50, 32).bfloat16(), numbers(3, 32, seed=1).bfloat16()
    monkeypatch.setattr(linear, "kernel_runs", lambda: False)
    head = make_head(weight)
    assert head(x).dtype == torch.float32
    assert torch.allclose(head(x), F.linear(x.float(), weight.float()), atol=1e-5)


def test_kernels_for_linear_layers_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EB_KERNELS", "off")
    linear.kernel_runs.cache_clear()
    try:
        layer = make_linear(numbers(64, 32).bfloat16(), None)
    finally:
        monkeypatch.undo()
        linear.kernel_runs.cache_clear()
    assert not isinstance(layer, KernelLinear)


@needs_kernel
@pytest.mark.parametrize("wanted", ["TILES", "DOT", "FMA"])
def test_a_way_is_taken_in_a_new_process_only_as_far_as_the_system_permits_it(wanted: str) -> None:
    constants = declarations().constants
    program = f"""
import ctypes
library = ctypes.CDLL({linear._library()._name!r})
class Linear(ctypes.Structure):
    _fields_ = [("packed", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("n", ctypes.c_int64), ("k", ctypes.c_int64),
                ("format", ctypes.c_int)]
took = library.packed_linear_use({constants[wanted]})
packed, x, out = (ctypes.create_string_buffer(65536) for _ in range(3))
w = Linear(ctypes.addressof(packed), None, 64, 64, {constants["BFLOAT16"]})
m = ctypes.c_int64(16)
library.packed_linear(ctypes.byref(w), x, None, out, m, {constants["PLAIN"]}, None, None)
print(took, set(out.raw))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    can = linear._library().packed_linear_has(constants[wanted])
    assert (done.returncode, done.stdout) == (0, f"{can} {{0}}\n"), done.stderr
