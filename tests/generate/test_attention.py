"""Attention over pages: the C kernel against the oracle in every format and way, its bits, its fallback and its cache."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from generate.cpu import kernels, linear
from generate.cpu.attention import ENTRIES, CAttention, PackedRows, TorchAttention, dequantize, make_attention, quantize
from generate.cpu.instructions import WAYS
from generate.cpu.team import team
from models.architecture import FULL, Reach
from tests.support.generate import NAN, World, assert_close, need_compiler, pieces

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
EACH = pytest.mark.parametrize(("dtype", "kv_dtype"), ENTRIES, ids=str)
LENGTHS = [1, 16, 33, 64, 130, 210]
# H, KV, D, P. Heads of a multiple of 64 are multiplied in WAYS where rows and pools are bfloat16.
WIDE = [(4, 4, 64, 64), (9, 3, 64, 16), (20, 2, 64, 32), (4, 2, 128, 64), (3, 1, 192, 64), (2, 2, 256, 32)]
OTHER = [
    (12, 12, 8, 16),
    (6, 3, 24, 16),
    (3, 3, 32, 16),
    (5, 1, 80, 64),
    (16, 1, 24, 32),
    (3, 3, 80, 128),
    (2, 2, 5, 16),
]
REACHES = [Reach(1), Reach(17), Reach(64, 3.0), Reach(200, 0.5), Reach(0, 1.0), Reach(alibi=2), Reach(100, 0.5, 4)]
WINDOWS = [(reach, *shape) for shape in [(4, 2, 64, 64), (3, 1, 64, 16), (2, 2, 5, 16)] for reach in REACHES]
QUICK = WINDOWS[::3]  # each reach and each shape
CASES = [(FULL, *shape) for shape in WIDE + OTHER] + QUICK + [case for case in WINDOWS if case not in QUICK]
BFLOAT16 = (torch.bfloat16, torch.bfloat16)
RUNS = [
    pytest.param(*entry, way, *case, marks=() if n < len(CASES) - len(WINDOWS) + len(QUICK) else pytest.mark.full)
    for n, case in enumerate(CASES)
    for entry in ENTRIES
    for way in (WAYS if entry == BFLOAT16 and case[3] % 64 == 0 else [""])
]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _kernels_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EB_KERNELS", raising=False)


@pytest.fixture
def kv_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype


@pytest.fixture
def kernel(dtype: torch.dtype, kv_dtype: torch.dtype) -> Iterator[CAttention]:
    need_compiler()
    kernel = CAttention(dtype, kv_dtype)
    yield kernel
    kernel.use(linear.bfloat16_way())


def take(kernel: CAttention, way: str) -> None:
    kernel.use(way)
    if kernel.name != f"c-{way}":
        pytest.skip(f"needs a processor that multiplies bfloat16 heads by {way}")


@pytest.mark.parametrize(("dtype", "kv_dtype", "way", "reach", "H", "KV", "D", "P"), RUNS)
def test_every_format_agrees_with_the_oracle_and_gives_a_token_one_result(
    kernel: CAttention,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    way: str,
    reach: Reach,
    H: int,
    KV: int,
    D: int,
    P: int,
) -> None:
    """Whatever the pieces of its prompt, its neighbors and the number of threads."""
    if way:
        take(kernel, way)
    world = World(LENGTHS, H, D, P, dtype, KV=KV, kv_dtype=kv_dtype)
    world.reach = reach
    whole = world.run(kernel, [dict(enumerate(LENGTHS))], padding=1)
    mixed = pieces(LENGTHS, D)
    assert_close(whole, world.run(TorchAttention(), mixed, padding=2), dtype, kv_dtype)
    others = [
        world.run(kernel, [{i: n} for i, n in enumerate(LENGTHS)]),
        world.run(kernel, [{i: 1 for i, n in enumerate(LENGTHS) if t < n} for t in range(max(LENGTHS))]),
    ]
    for threads, own in ((3, True), (2, False)):
        team().use(threads, own)
        others.append(world.run(kernel, mixed))
    for other in others:
        assert all(torch.equal(got, expected) for got, expected in zip(other, whole, strict=True))


@EACH
def test_long_contexts_agree_with_the_oracle(kernel: CAttention, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    world = World([1000, 1024, 1500], 2, 64, 64, dtype, kv_dtype=kv_dtype)
    steps = [{0: 999, 1: 1023, 2: 1400}, {0: 1, 1: 1, 2: 100}]
    assert_close(world.run(kernel, steps), world.run(TorchAttention(), steps), dtype, kv_dtype)


@pytest.mark.parametrize("factor", [1.0, 1e-20, 3e-37, 0.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16])
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


@EACH
@pytest.mark.parametrize("attention", ["c", "torch"])
def test_what_is_not_finite_stays_in_its_own_sequence(
    kernel: CAttention, dtype: torch.dtype, kv_dtype: torch.dtype, attention: str
) -> None:
    one = kernel if attention == "c" else TorchAttention()
    steps = [{0: 39, 1: 40, 2: 30}, {0: 1, 1: 1, 2: 12}]
    clean = World([40, 41, 42], 2, 64, 16, dtype, kv_dtype=kv_dtype).run(one, steps)
    small = kv_dtype == torch.int8
    for value in (NAN, math.inf, -math.inf) if small else (NAN,):
        for column in (2 * 64, 4 * 64 + 5) if small else (0, 2 * 64, 4 * 64 + 5):  # a query's, a key's, a value's
            world = World([40, 41, 42], 2, 64, 16, dtype, kv_dtype=kv_dtype)
            world.tokens[1][40, column] = value
            poisoned = world.run(one, steps)
            spoilt = poisoned[1][40].view(2, 64)[0].isnan()
            assert spoilt.all() if small else spoilt.any()
            for got, expected in zip((poisoned[0], poisoned[1][:40], poisoned[2]), (clean[0], clean[1][:40], clean[2])):
                assert torch.equal(got, expected)


@BOTH
def test_8_bits_keep_the_values_of_zeros_and_of_huge_numbers(dtype: torch.dtype) -> None:
    need_compiler()
    for factor in (0.0, 1e-35, 1e30):
        world = World([20], 2, 64, 16, dtype, kv_dtype=torch.int8)
        world.tokens[0][:, 4 * 64 :] *= factor  # values
        rows = world.run(CAttention(dtype, torch.int8), [{0: 20}])[0].float()
        expected = world.run(TorchAttention(), [{0: 20}])[0].float()
        assert rows.isfinite().all()
        torch.testing.assert_close(rows, expected, rtol=0.02, atol=2e-2 * factor)


def test_a_row_is_quantized_to_half_a_step() -> None:
    x = torch.randn(50, 3, 80)
    error = (dequantize(quantize(x)) - x).abs()
    assert (error <= x.abs().amax(-1, keepdim=True) / 127 * 0.501).all()
    assert quantize(x).shape == (50, 3, 84)


@EACH
def test_pages_far_before_the_window_may_hold_anything(
    kernel: CAttention, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    for attention, P in ((kernel, 64), (kernel, 16), (TorchAttention(), 64), (TorchAttention(), 16)):
        world = World([300], 3, 64, P, dtype, KV=1, kv_dtype=kv_dtype)
        world.reach = Reach(40)
        clean = world.run(attention, [{0: 200}, {0: 100}])[0][200:]
        world.clear()
        world.step(attention, {0: 200})
        gone = world.block_tables[0, : (200 - 40 + 1) // P - 1].long()
        for pool in (world.keys, world.values):
            pool[gone] = -1 if kv_dtype == torch.int8 else NAN
        assert torch.equal(world.step(attention, {0: 100})[0], clean)


@BOTH
@pytest.mark.parametrize("attention", ["c", "torch"])
def test_computing_a_position_again_changes_nothing(kernel: CAttention, dtype: torch.dtype, attention: str) -> None:
    one = kernel if attention == "c" else TorchAttention()
    world = World([100], 2, 64, 16, dtype)
    first = world.run(one, [{0: 100}])[0]
    for again in (99, 37, 64):  # also in the middle, with later positions in place
        keys, values = world.keys.clone(), world.values.clone()
        world.done[0] = again
        row = world.step(one, {0: 1})[0]
        torch.testing.assert_close(row, first[again : again + 1], rtol=0, atol=0 if one is kernel else 1e-2)
        assert torch.equal(world.keys.nan_to_num(), keys.nan_to_num())
        assert torch.equal(world.values.nan_to_num(), values.nan_to_num())


@BOTH
def test_a_shared_prefix_is_read_and_not_written(kernel: CAttention, dtype: torch.dtype) -> None:
    world = World([100, 100], 2, 64, 16, dtype)
    world.tokens[1][:64] = world.tokens[0][:64]
    own = world.run(kernel, [{0: 100, 1: 100}])
    world.block_tables[1, :4] = world.block_tables[0, :4]
    world.clear()
    world.step(kernel, {0: 64})
    shared = world.block_tables[0, :4].long()
    before = world.keys[shared].clone(), world.values[shared].clone()
    world.done[1] = 64
    rows = world.step(kernel, {0: 36, 1: 36})
    assert torch.equal(rows[0], own[0][64:])
    assert torch.equal(rows[1], own[1][64:])
    assert torch.equal(world.keys[shared], before[0])
    assert torch.equal(world.values[shared], before[1])


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8], ids=str)
def test_the_oracle_is_plain_causal_attention(kv_dtype: torch.dtype) -> None:
    world = World([50], 6, 16, 16, torch.float32, KV=3, kv_dtype=kv_dtype)
    q, *past = world.tokens[0].view(50, 12, 16).transpose(0, 1)[None].split((6, 3, 3), 1)
    if kv_dtype == torch.int8:
        past = [dequantize(quantize(part)) for part in past]
    expected = (
        F.scaled_dot_product_attention(q, *past, is_causal=True, enable_gqa=True)[0].transpose(0, 1).reshape(50, 96)
    )
    for steps in ([{0: 50}], [{0: 20}, {0: 1}, {0: 29}]):
        assert_close(world.run(TorchAttention(), steps, padding=2), [expected], torch.float32, kv_dtype)


@pytest.mark.parametrize(
    ("cu_seqlens", "context_lens", "table", "word"),
    [
        ([0, 1], [0], [0, 1], "context_lens"),
        ([0, 3], [2], [0, 1], "context_lens"),
        ([0, 0], [1], [0, 1], "cu_seqlens"),
        ([0, 9], [9], [0, 1], "rows"),
        ([0, 1], [33], [0, 1], "block_tables"),
        ([0, 1], [17], [0, 2], "page"),
        ([0, 1], [1], [-1, 0], "page"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32])
def test_rows_outside_memory_are_refused(
    kernel: CAttention, cu_seqlens: list[int], context_lens: list[int], table: list[int], word: str
) -> None:
    rows = PackedRows(*(torch.tensor(x, dtype=torch.int32) for x in (cu_seqlens, context_lens, [table])))
    pools = torch.zeros(2, 2, 2, 16, 8)
    with pytest.raises(ValueError, match=word):
        kernel(torch.zeros(4, 48), pools[0], pools[1], rows, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32])
def test_tensors_of_the_wrong_kind_are_refused(kernel: CAttention) -> None:
    rows = PackedRows(*(torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [1], [[0]])))
    good, pool = torch.zeros(1, 48), torch.zeros(2, 2, 16, 8)
    for qkv, keys in [
        (good.bfloat16(), pool),
        (good, pool.double()),
        (good, pool.transpose(0, 1)),
        (good[:, :24], pool),
        (good[:, :44].contiguous(), pool),
        (torch.zeros(1, 7 * 8), pool),
        (good, torch.zeros(2, 2, 8, 8)),
    ]:
        with pytest.raises(ValueError, match=r"Pass|Use"):
            kernel(qkv, keys, keys, rows, 1.0)
    with pytest.raises(ValueError, match="int32"):
        PackedRows(torch.tensor([0, 1]), rows.context_lens, rows.block_tables)


@EACH
def test_the_kernel_passes_its_self_test_and_is_chosen(
    kernel: CAttention, dtype: torch.dtype, kv_dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    assert make_attention(dtype, "cpu", kv_dtype).name == kernel.name
    assert kernel.name.startswith("c")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("dtype", [torch.float32])
def test_loading_leaves_denormals_on(kernel: CAttention) -> None:
    assert torch.tensor(1e-310, dtype=torch.float64).mul(1.0).item() != 0
    assert float("1e-310") * 1.0 != 0


@pytest.mark.parametrize("dtype", [torch.float32])
def test_a_second_load_compiles_nothing(kernel: CAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_build", lambda *_: pytest.fail("compiled again"))
    assert make_attention(torch.float32).name == kernel.name


@pytest.mark.parametrize(
    ("compiler", "word"),
    [("", "no C compiler"), ("no-such-compiler -m64", "no-such-compiler"),
     ("sh -c 'echo unknown machine >&2; exit 1'", "unknown machine"), ("ours", "is off by")],
)  # fmt: skip
def test_without_a_kernel_torch_serves_and_one_warning_gives_the_reason(
    compiler: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CC", raising=False)
    if compiler == "ours":
        monkeypatch.setattr(CAttention, "__init__", lambda self, *_: setattr(self, "name", "c"))
        monkeypatch.setattr(CAttention, "__call__", lambda *_: torch.zeros(()))
    elif compiler:
        monkeypatch.setenv("CC", compiler)
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    attention = make_attention(torch.bfloat16)
    assert attention.name == "torch"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert word in record.getMessage()
    world = World([20], 2, 8, 16, torch.bfloat16)
    assert world.run(attention, [{0: 19}, {0: 1}])[0].isfinite().all()


def test_other_dtypes_and_kernels_that_are_turned_off_are_served_by_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert make_attention(torch.float16).name == "torch"
    monkeypatch.setenv("EB_KERNELS", "off")
    assert make_attention(torch.float32).name == "torch"
    assert not caplog.records


@pytest.mark.parametrize("dtype", [torch.float32])
@pytest.mark.parametrize("march", ["x86-64-v2", "x86-64-v3"])
@pytest.mark.usefixtures("kernel")
def test_the_portable_path_agrees_on_lesser_machines(march: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "-march=native" not in kernels._machine_flags():
        pytest.skip("needs a processor of the x86 family")
    monkeypatch.setattr(kernels, "_machine_flags", lambda: [f"-march={march}"])
    for dtype, kv_dtype in ENTRIES:
        attention = CAttention(dtype, kv_dtype)
        assert attention.name == "c"
        for D in (64, 6):
            world = World([90, 33], 3, D, 16, dtype, kv_dtype=kv_dtype)
            steps = [{0: 50, 1: 1}, {1: 32, 0: 40}]
            got = world.run(attention, steps)
            assert_close(got, world.run(TorchAttention(), steps), dtype, kv_dtype)
            singly = world.run(attention, [{0: 1, 1: 1}] * 33 + [{0: 1}] * 57)
            assert all(torch.equal(a, b) for a, b in zip(got, singly))
