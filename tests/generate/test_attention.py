"""Attention over pages: the C kernel against the oracle, its bits, its fallback and its cache."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from generate.cpu import kernels
from generate.cpu.attention import ENTRIES, CAttention, PackedRows, TorchAttention, make_attention
from generate.cpu.team import team
from tests.support import points
from tests.support.generate import NAN, World, assert_close, need_compiler

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
EACH = pytest.mark.parametrize(("dtype", "kv_dtype"), ENTRIES, ids=str)
SHAPES = [(16, 64, 16), (25, 64, 64), (12, 8, 16), (12, 80, 64), (3, 32, 16), (12, 64, 64), (16, 64, 128), (16, 16, 64)]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _kernels_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EB_KERNELS", raising=False)


@pytest.fixture
def kv_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype


@pytest.fixture
def kernel(dtype: torch.dtype, kv_dtype: torch.dtype) -> CAttention:
    need_compiler()
    return CAttention(dtype, kv_dtype)


@BOTH
@pytest.mark.parametrize(("H", "D", "P"), points(5, *SHAPES))
def test_a_ragged_mix_agrees_with_the_oracle(kernel: CAttention, dtype: torch.dtype, H: int, D: int, P: int) -> None:
    lengths = [1, 63, 64, 65, 127, 200]
    world = World(lengths, H, D, P, dtype)
    steps = [
        {0: 1, 1: 62, 2: 63, 4: 100},
        {1: 1, 5: 199, 2: 1, 3: 65},  # decode rows among chunks
        {5: 1, 4: 27},
    ]
    assert_close(world.run(kernel, steps), world.run(TorchAttention(), steps, padding=2), dtype)
    assert_close(world.run(kernel, steps, padding=3), world.run(TorchAttention(), steps), dtype)


@BOTH
def test_long_contexts_agree_with_the_oracle(kernel: CAttention, dtype: torch.dtype) -> None:
    world = World([1000, 1024, 1500], 2, 64, 64, dtype)
    steps = [{0: 999, 1: 1023, 2: 1400}, {0: 1, 1: 1, 2: 100}]
    assert_close(world.run(kernel, steps), world.run(TorchAttention(), steps), dtype)


@EACH
@pytest.mark.parametrize(("D", "P"), [(64, 64), (64, 16), (8, 16), (80, 128), (5, 16)])
def test_chunking_and_neighbors_do_not_change_a_bit(
    kernel: CAttention, dtype: torch.dtype, kv_dtype: torch.dtype, D: int, P: int
) -> None:
    lengths = [150, 65, 70]
    world = World(lengths, 3, D, P, dtype, kv_dtype=kv_dtype)
    whole = world.run(kernel, [dict(enumerate(lengths))])
    chunked = world.run(
        kernel, [{0: 7, 1: 1}, {0: 57, 2: 33, 1: 15}, {0: 2, 1: 16, 2: 1}, {0: 84, 1: 33, 2: 36}], padding=1
    )
    singly = world.run(kernel, [{i: 1} for i, n in enumerate(lengths) for _ in range(n)])
    together = world.run(kernel, [{i: 1 for i, n in enumerate(lengths) if t < n} for t in range(max(lengths))])
    for other in (chunked, singly, together):
        for got, expected in zip(other, whole):
            assert torch.equal(got, expected)


@EACH
def test_the_number_of_threads_does_not_change_a_bit(
    kernel: CAttention, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    lengths = [300, 200, 700]
    world = World(lengths, 4, 64, 64, dtype, kv_dtype=kv_dtype)
    results = []
    steps = [{0: 299, 2: 150}, {0: 1, 1: 200, 2: 549}, {2: 1}]
    for threads, own in ((1, True), (2, True), (3, True), (2, False), (3, False)):
        team().use(threads, own)
        results.append(world.run(kernel, steps))
    for other in results[1:]:
        assert all(torch.equal(got, expected) for got, expected in zip(other, results[0]))


@EACH
@pytest.mark.parametrize(("H", "KV", "D"), [(9, 3, 64), (8, 2, 128), (6, 3, 24), (20, 2, 64), (5, 1, 80)])
def test_a_group_of_heads_shares_its_keys(
    kernel: CAttention, dtype: torch.dtype, kv_dtype: torch.dtype, H: int, KV: int, D: int
) -> None:
    lengths = [70, 1, 34]
    world = World(lengths, H, D, 16, dtype, KV=KV, kv_dtype=kv_dtype)
    steps = [{0: 33, 2: 33}, {0: 1, 1: 1, 2: 1}, {0: 36}]
    got = world.run(kernel, steps, padding=1)
    assert_close(got, world.run(TorchAttention(), steps), dtype, kv_dtype)
    singly = world.run(kernel, [{i: 1} for i, n in enumerate(lengths) for _ in range(n)])
    team().use(3, own=True)
    for other in (singly, world.run(kernel, [dict(enumerate(lengths))])):
        assert all(torch.equal(a, b) for a, b in zip(other, got))


@BOTH
def test_a_nan_stays_in_its_own_sequence(kernel: CAttention, dtype: torch.dtype) -> None:
    world = World([40, 41, 42], 2, 64, 16, dtype)
    steps = [{0: 39, 1: 40, 2: 30}, {0: 1, 1: 1, 2: 12}]
    clean = world.run(kernel, steps)
    for column in (0, 2 * 64, 4 * 64 + 5):  # a query's, a key's, a value's
        world = World([40, 41, 42], 2, 64, 16, dtype)
        world.tokens[1][40, column] = NAN
        poisoned = world.run(kernel, steps)
        assert poisoned[1][40].isnan().any()
        assert torch.equal(poisoned[1][:40], clean[1][:40])
        assert torch.equal(poisoned[0], clean[0])
        assert torch.equal(poisoned[2], clean[2])


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


def test_the_oracle_is_plain_causal_attention() -> None:
    world = World([50], 3, 16, 16, torch.float32)
    q, k, v = world.tokens[0].view(50, 3, 3, 16).permute(1, 2, 0, 3)
    scores = (q @ k.transpose(1, 2) / 4).masked_fill(torch.ones(50, 50).triu(1).bool(), -math.inf)
    expected = (scores.softmax(2) @ v).transpose(0, 1).reshape(50, 48)
    for steps in ([{0: 50}], [{0: 20}, {0: 1}, {0: 29}]):
        torch.testing.assert_close(world.run(TorchAttention(), steps, padding=2)[0], expected)


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


@pytest.mark.parametrize("how", ["none", "missing", "failing", "wrong"])
def test_without_a_kernel_torch_serves_and_one_warning_gives_the_reason(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CC", raising=False)
    if how == "none":
        monkeypatch.setenv("PATH", str(tmp_path))
        word = "no C compiler"
    elif how == "missing":
        monkeypatch.setenv("CC", "no-such-compiler -m64")
        word = "no-such-compiler"
    elif how == "failing":
        script = tmp_path / "cc"
        script.write_text("#!/bin/sh\necho 'unknown machine' >&2\nexit 1\n")
        script.chmod(0o755)
        monkeypatch.setenv("CC", str(script))
        word = "unknown machine"
    else:
        monkeypatch.setattr(CAttention, "__init__", lambda self, *_: setattr(self, "name", "c"))
        monkeypatch.setattr(CAttention, "__call__", lambda *_: torch.zeros(()))
        word = "is off by"
    attention = make_attention(torch.bfloat16)
    assert attention.name == "torch"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert word in record.getMessage()
    world = World([20], 2, 8, 16, torch.bfloat16)
    assert world.run(attention, [{0: 19}, {0: 1}])[0].isfinite().all()


def test_kernels_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("EB_KERNELS", "off")
    assert make_attention(torch.float32).name == "torch"
    assert not caplog.records


def test_other_dtypes_are_served_by_torch() -> None:
    assert make_attention(torch.float16).name == "torch"


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


def test_the_module_works_in_a_process_of_its_own() -> None:
    code = "import generate.cpu.attention as a, torch; print(a.make_attention(torch.bfloat16).name)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("c", "c-tiles", "c-dot", "c-fma", "torch")
