"""The ways to multiply bfloat16 heads in attention: tiles, dot products and float32, each with one order of sums."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from generate.cpu import linear
from generate.cpu.attention import CAttention, TorchAttention
from generate.cpu.instructions import WAYS
from generate.cpu.team import team
from tests.support.generate import World, assert_close, need_compiler, pieces

SHAPES = [(4, 4, 64, 64), (9, 3, 64, 16), (20, 2, 64, 32), (4, 2, 128, 64), (3, 1, 192, 64), (2, 2, 256, 32)]
LENGTHS = [1, 16, 33, 64, 150, 331]


@pytest.fixture
def kernel(one_thread: None) -> Iterator[CAttention]:
    need_compiler()
    kernel = CAttention(torch.bfloat16)
    yield kernel
    kernel.use(linear.bfloat16_way())


def take(kernel: CAttention, way: str) -> None:
    kernel.use(way)
    if kernel.name != f"c-{way}":
        pytest.skip(f"needs a processor that multiplies bfloat16 heads by {way}")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_way_agrees_with_the_oracle_and_gives_a_token_one_result(
    kernel: CAttention, shape: tuple[int, int, int, int], way: str
) -> None:
    take(kernel, way)
    H, KV, D, P = shape
    world = World(LENGTHS, H, D, P, torch.bfloat16, KV=KV)
    whole = world.run(kernel, [dict(enumerate(LENGTHS))])
    assert_close(whole, world.run(TorchAttention(), [dict(enumerate(LENGTHS))]), torch.bfloat16)
    together = [{i: 1 for i, n in enumerate(LENGTHS) if t < n} for t in range(max(LENGTHS))]
    mixed = world.run(kernel, pieces(LENGTHS, D), padding=1)
    team().use(3, own=True)
    for other in (mixed, world.run(kernel, together)):
        assert all(torch.equal(got, expected) for got, expected in zip(other, whole))


@pytest.mark.parametrize("factor", [1.0, 1e-20, 3e-37, 0.0, 1e30])
def test_float32_has_the_bits_of_tiles_even_for_tiny_numbers(kernel: CAttention, factor: float) -> None:
    world = World(LENGTHS, 4, 64, 64, torch.bfloat16, KV=2)
    for tokens in world.tokens:
        tokens[:, 6 * 64 :] *= factor  # values; some of 3e-37 are denormal, and so are their products with weights
        tokens[::3, : 6 * 64] *= factor
    results = []
    for way in ("tiles", "fma"):
        take(kernel, way)
        results.append(world.run(kernel, pieces(LENGTHS, 1)))
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(*results))  # 1e30 squared is infinite
    assert torch.tensor(1e-40).mul(1.0).item() != 0  # the caller's own denormals are as before


def test_a_way_that_the_processor_lacks_leaves_the_kernel_as_it_is(
    kernel: CAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kernel.name
    monkeypatch.setattr(kernel, "library", type("Library", (), {"paged_attention_use": lambda self, way: 0})())
    kernel.use("fma")
    assert kernel.name == before
