"""The linear layers compute what PyTorch does, and a row's numbers do not depend on how many rows there are."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from generate.cpu import linear
from generate.cpu.declarations import declarations
from generate.cpu.linear import KernelLinear, Linear, PackedLinear, make_gated, make_head, make_linear, round_rows
from tests.support.generate import numbers, why_no_kernel

ROWS = (1, 2, 3, 5, 6, 7, 12, 13, 15, 16, 17, 31, 64, 191, 192, 193, 400)

needs_kernel = pytest.mark.skipif(not linear.kernel_runs(), reason=why_no_kernel())


@needs_kernel
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("n", "k"), [(192, 128), (100, 64), (1003, 250), (64, 1024), (70, 96)])
def test_the_kernel_agrees_with_float32_sums_at_every_number_of_rows(n: int, k: int) -> None:
    weight, bias = (numbers(n, k, seed=1) / k**0.5).bfloat16(), numbers(n, seed=2).bfloat16()
    layer = KernelLinear(weight, bias, wide=True)
    x = numbers(max(ROWS), k, seed=3).bfloat16()
    expected = F.linear(x.float(), weight.float(), bias.float())
    whole = layer(x)
    assert (whole - expected).abs().max() < 1e-4
    for rows in ROWS:
        assert torch.equal(layer(x[:rows].contiguous()), whole[:rows])


@needs_kernel
@pytest.mark.usefixtures("way")
def test_the_kernel_fuses_residual_and_gelu() -> None:
    weight, bias = (numbers(192, 128) / 12).bfloat16(), numbers(192).bfloat16()
    x, residual = numbers(9, 128, seed=4).bfloat16(), numbers(9, 192, seed=5).bfloat16()
    plain = F.linear(x.float(), weight.float(), bias.float())
    added = KernelLinear(weight, bias).add(x, residual).float()
    assert torch.allclose(added, plain + residual.float(), atol=0.02, rtol=0.01)
    for activation, form in (("gelu_new", "tanh"), ("gelu", "none")):
        active = KernelLinear(weight, bias, activation)(x).float()
        assert torch.allclose(active, F.gelu(plain, approximate=form), atol=0.01, rtol=0.01)
    other = KernelLinear(weight, bias, "relu")(x).float()
    assert torch.allclose(other, plain.relu(), atol=0.02, rtol=0.01)


@needs_kernel
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("inner", "k"), [(96, 64), (50, 128), (7, 10)])
def test_the_kernel_fuses_a_gate(inner: int, k: int) -> None:
    weight, bias = (numbers(2 * inner, k) / k**0.5).bfloat16(), numbers(2 * inner, seed=2).bfloat16()
    x = numbers(193, k, seed=3).bfloat16()
    x[3, 0] = float("nan")
    for given in (bias, None):
        layer = make_gated(weight, given, "silu")
        gate, up = F.linear(x.float(), weight.float(), None if given is None else given.float()).chunk(2, -1)
        whole = layer(x)
        assert torch.allclose(whole.float(), F.silu(gate) * up, atol=0.01, rtol=0.01, equal_nan=True)
        for rows in (4, 16, 17, 40):
            assert torch.equal(layer(x[:rows].contiguous()).nan_to_num(), whole[:rows].nan_to_num())


@needs_kernel
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 40, 193, 200])
def test_a_residual_is_added_once_in_place(rows: int) -> None:
    layer = KernelLinear((numbers(70, 96) / 12).bfloat16(), numbers(70).bfloat16())
    x, residual = numbers(rows, 96, seed=4).bfloat16(), numbers(rows, 70, seed=5).bfloat16()
    expected = layer.add(x, residual)
    pointers = x.data_ptr(), residual.data_ptr(), residual.data_ptr()
    layer.library.packed_linear(ctypes.byref(layer.struct), *pointers, rows, layer.plain, None, None)
    assert torch.equal(residual, expected)


@needs_kernel
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30, 1e30, -50.0, 50.0])
def test_gelu_is_right_at_its_ends_and_keeps_values_that_are_not_finite(value: float) -> None:
    weight = torch.zeros(64, 2).bfloat16()
    weight[:, 0] = 1
    x = torch.tensor([[value, 0.0]]).bfloat16()
    for activation, form in (("gelu_new", "tanh"), ("gelu", "none")):
        found = KernelLinear(weight, None, activation)(x).float()
        expected = F.gelu(x[:, :1].float(), approximate=form).expand(1, 64)
        assert torch.allclose(found, expected, rtol=0.01, equal_nan=True)


@needs_kernel
def test_gelus_erf_form_is_right_to_the_last_bits() -> None:
    x = torch.linspace(-6, 6, 4096).bfloat16()
    weight = torch.zeros(64, 2).bfloat16()
    weight[:, 0] = 1
    found = KernelLinear(weight, None, "gelu")(F.pad(x[:, None], (0, 1)))[:, 0].float()
    expected = F.gelu(x.double())
    assert ((found - expected).abs() <= 2**-8 * expected.abs() + 4e-7).all()


@needs_kernel
@pytest.mark.usefixtures("way")
def test_a_row_that_is_not_finite_changes_no_other() -> None:
    layer = KernelLinear(numbers(64, 32).bfloat16(), None, wide=True)
    x = numbers(20, 32, seed=6).bfloat16()
    clean = layer(x)
    x[7] = float("nan")
    spoilt = layer(x)
    assert spoilt[7].isnan().all()
    keep = [i for i in range(20) if i != 7]
    assert torch.equal(spoilt[keep], clean[keep])


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
