"""Layers in which a token sees only a window of the keys before it, scores with a cap, and scores that fall with the distance."""

from __future__ import annotations

import pytest
import torch

from generate.cpu.attention import ENTRIES, CAttention, TorchAttention
from generate.cpu.team import team
from models.architecture import Reach
from tests.support import points
from tests.support.generate import NAN, World, assert_close, need_compiler

EACH = pytest.mark.parametrize(("dtype", "kv_dtype"), ENTRIES, ids=str)
LENGTHS = [700, 65, 130]
SHAPES = [(4, 2, 64, 64), (3, 1, 64, 16), (2, 2, 5, 16)]  # H, KV, D, P
REACHES = [Reach(1), Reach(17), Reach(64, 3.0), Reach(600, 0.5), Reach(0, 1.0), Reach(alibi=2), Reach(100, 0.5, 4)]
ALL = [(reach, *shape) for shape in SHAPES for reach in REACHES]
QUICK = ALL[::3]  # each reach and each shape

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def kernel(dtype: torch.dtype, kv_dtype: torch.dtype) -> CAttention:
    need_compiler()
    return CAttention(dtype, kv_dtype)


@EACH
@pytest.mark.parametrize(
    ("reach", "H", "KV", "D", "P"), points(len(QUICK), *QUICK, *(case for case in ALL if case not in QUICK))
)
def test_a_window_agrees_with_the_oracle_and_no_neighbor_changes_a_bit(
    kernel: CAttention, dtype: torch.dtype, kv_dtype: torch.dtype, H: int, KV: int, D: int, P: int, reach: Reach
) -> None:  # fmt: skip
    world = World(LENGTHS, H, D, P, dtype, KV=KV, kv_dtype=kv_dtype)
    world.reach = reach
    whole = world.run(kernel, [dict(enumerate(LENGTHS))], padding=1)
    assert_close(whole, world.run(TorchAttention(), [{0: 650, 1: 65}, {0: 50, 2: 130}]), dtype, kv_dtype)
    singly = world.run(kernel, [{i: 1 for i, n in enumerate(LENGTHS) if t < n} for t in range(max(LENGTHS))])
    team().use(2, own=True)
    for other in (singly, world.run(kernel, [{0: 333, 1: 1}, {0: 300, 1: 64, 2: 99}, {0: 67, 2: 31}])):
        assert all(torch.equal(got, expected) for got, expected in zip(other, whole))


@EACH
@pytest.mark.parametrize("P", [64, 16])
def test_pages_far_before_the_window_may_hold_anything(
    kernel: CAttention, dtype: torch.dtype, kv_dtype: torch.dtype, P: int
) -> None:
    for attention in (kernel, TorchAttention()):
        world = World([300], 3, 64, P, dtype, KV=1, kv_dtype=kv_dtype)
        world.reach = Reach(40)
        clean = world.run(attention, [{0: 200}, {0: 100}])[0][200:]
        world.clear()
        world.step(attention, {0: 200})
        gone = world.block_tables[0, : (200 - 40 + 1) // P - 1].long()
        for pool in (world.keys, world.values):
            pool[gone] = -1 if kv_dtype == torch.int8 else NAN
        assert torch.equal(world.step(attention, {0: 100})[0], clean)
