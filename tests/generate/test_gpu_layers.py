"""The GPU's layers compute what PyTorch does, for every family: Triton's kernels in its interpreter, no GPU needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from generate.cpu.attention import TorchAttention
from generate.gpu import choose
from generate.gpu.layers import FusedMath, Layer, Norm, PlainMath, StrictMath
from generate.gpu.runner import GpuRunner
from generate.params import GREEDY
from generate.rotary import Turn, rotation_table
from generate.runner import ModelRunner
from models.architecture import Architecture, Rope
from scheduling.sequence import Sequence
from tests.support import points
from tests.support.generate import ARCHITECTURES, LLAMA, multiply_in_one_order, random_network, run

pytest.importorskip("triton", reason="Triton is not there: pip install triton")
from generate.gpu.triton_attention import TritonDecode
from generate.gpu.triton_prompts import TritonPrompts

CPU = torch.device("cpu")


# Not bfloat16: the interpreter multiplies its bit patterns as if they were integers, and does not round to it.
@pytest.mark.parametrize("dtype", points(1, torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_strict_layers_agree_with_pytorchs(name: str, dtype: torch.dtype) -> None:
    error = choose.math_error(StrictMath(), PlainMath(), ARCHITECTURES[name], dtype, CPU)
    assert error < choose.TOLERANCE[dtype]


def test_an_activation_without_a_kernel_is_pytorchs() -> None:
    for activation in ("relu", "gelu_new"):
        config = replace(LLAMA, activation=activation)
        assert choose.math_error(StrictMath(), PlainMath(), config, torch.float32, CPU) < 1e-4


def plain_runner(config: Architecture) -> ModelRunner:
    """Return the CPU's runner without kernels."""
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr("generate.runner.make_attention", lambda *_: TorchAttention())
        return ModelRunner(random_network(config), 120, 64)


class Wrong(PlainMath):
    """One part is slightly off."""

    def __init__(self, part: str) -> None:
        self.part = part

    def add_norm(self, residual, x, norm, dtype):  # type: ignore[no-untyped-def]
        eps = 0.1 if self.part == "norm" else norm.eps
        return super().add_norm(residual, x, norm._replace(eps=eps), dtype)

    def linear(self, x, layer):  # type: ignore[no-untyped-def]
        return super().linear(x, layer._replace(activation="gelu") if self.part == "gate" else layer)

    def turn(self, qkv, rotation, turn):  # type: ignore[no-untyped-def]
        norms = None if self.part == "head norms" else turn.norms
        return super().turn(
            qkv, rotation.roll(1, 1) if self.part == "rotation" else rotation, turn._replace(norms=norms)
        )


@pytest.mark.parametrize("part", ["norm", "gate", "rotation", "head norms"])
def test_the_comparison_at_the_start_covers_every_part(part: str) -> None:
    assert choose.math_error(Wrong(""), PlainMath(), ARCHITECTURES["qwen3"], torch.float32, CPU) == 0
    assert choose.math_error(Wrong(part), PlainMath(), ARCHITECTURES["qwen3"], torch.float16, CPU) > 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotation_in_one_kernel_is_the_plain_one_and_leaves_values_alone(has_norms: bool, dtype: torch.dtype) -> None:
    qkv = choose.noise(5, (6 + 2 * 2) * 24).to(dtype)
    rotation = rotation_table(Rope(), 24, 900)[[0, 1, 7, 500, 899]]
    norms = choose.noise(2, 24, seed=1).to(dtype) if has_norms else None
    turn = Turn(6, 2, 24, norms, 1e-6)
    expected = PlainMath().turn(qkv, rotation, turn)
    found = FusedMath().turn(qkv.clone(), rotation, turn)
    assert torch.equal(found[:, -48:], qkv[:, -48:])
    assert not torch.equal(found[1, :192], qkv[1, :192])
    step = torch.finfo(dtype).eps
    assert ((found - expected).abs() <= 2 * step * (1 + expected.abs())).all()


def test_a_strict_product_is_the_same_to_the_bit_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_in_one_order(monkeypatch)
    x, weight, bias = choose.noise(70, 96), choose.noise(130, 96, seed=1), choose.noise(130, seed=2)
    layer, math_ = Layer(weight, bias, "gelu_new"), StrictMath()
    whole = math_.linear(x, layer)
    for rows in (1, 3, 65):
        assert torch.equal(math_.linear(x[:rows], layer), whole[:rows])
    for row in range(0, 70, 7):
        assert torch.equal(math_.linear(x[row : row + 1], layer)[0], whole[row])


def test_the_fused_norm_adds_to_the_residual_and_norms_the_sum() -> None:
    x, residual = choose.noise(5, 96).half(), choose.noise(5, 96, seed=1)
    norm = Norm(choose.noise(96, seed=2), choose.noise(96, seed=3), 1e-5)
    results = []
    for way in (FusedMath(), PlainMath()):
        sums = residual.clone()
        results.append((way.add_norm(sums, x, norm, torch.float32), sums))
    assert torch.equal(results[0][1], results[1][1])
    assert (results[0][0] - results[1][0]).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_an_rms_norm_multiplies_by_its_weight_after_the_cast(dtype: torch.dtype) -> None:
    residual = choose.noise(5, 96)
    norm = Norm(choose.noise(96, seed=2).to(dtype), None, 1e-5)
    rms = (residual.double().square().mean(1, keepdim=True) + 1e-5).sqrt()
    expected = (residual.double() / rms).to(dtype) * norm.weight
    for way in (FusedMath(), PlainMath()):
        found = way.add_norm(residual.clone(), None, norm, dtype)
        # A number between two of the format may be rounded to either, and its product once more.
        assert ((found - expected).abs() <= 2 * torch.finfo(dtype).eps * expected.abs()).all()
        assert dtype == torch.float32 or (found == expected).float().mean() > 0.99


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of rows of padding, which hold anything
@pytest.mark.full
def test_texts_of_the_kernels_are_the_cpus() -> None:
    config = replace(ARCHITECTURES["qwen3"], n_layer=1, block_size=128, n_embd=32, head_size=32, inner_size=32)

    def requests() -> list[Sequence]:
        return [Sequence([9, 8, i] * 21, 3, sampling=GREEDY) for i in range(2)]

    expected = run(None, requests(), runner=plain_runner(config))
    runner = GpuRunner(random_network(config), 120, 64, capacity=4, strict=True)
    runner.attend = TritonDecode(4, 2, config.n_head, config.n_kv_head, config.head_size, CPU)
    runner.prefill.attend = TritonPrompts()
    assert run(None, requests(), runner=runner) == expected
