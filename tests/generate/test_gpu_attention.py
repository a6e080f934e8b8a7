"""The GPU's attentions give what float64 gives: Triton's kernels in its interpreter, no GPU needed."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from generate.cpu.attention import slopes
from generate.gpu import choose
from generate.gpu.attention import DecodeRows, Pieces, PromptAttention, TorchDecode, TorchPrompts, causal, cut
from models.architecture import FULL, Reach
from tests.support import ROOT, points
from tests.support.generate import multiply_in_one_order
from tests.support.servers import clean_environment

pytest.importorskip("triton", reason="Triton is not there: pip install triton")
from generate.gpu.triton_attention import TritonDecode
from generate.gpu.triton_prompts import TritonPrompts

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NOT_BFLOAT16 = DTYPES[:2]  # the interpreter's tl.dot multiplies its bit patterns as if they were integers


class Case:
    """Rows of given lengths over a shuffled pool whose unused slots hold NaN."""

    def __init__(
        self, lengths: list[int], heads: int = 2, width: int = 64, size: int = 16, seed: int = 1,
        dtype: torch.dtype = torch.float32, kv_heads: int | None = None,
    ) -> None:  # fmt: skip
        self.heads, self.width = heads, width
        self.kv_heads = kv_heads = kv_heads or heads
        self.pages = max(2, -(-max(lengths) // size))
        n = len(lengths)
        numbers = list(range(1, 1 + n * self.pages))
        random.Random(seed).shuffle(numbers)
        block_tables = torch.tensor(numbers).view(n, self.pages)
        self.rows = DecodeRows(torch.tensor(lengths), block_tables)
        for row, length in enumerate(lengths):
            block_tables[row, -(-length // size) :] = 0
        shape = (1 + n * self.pages, kv_heads, size, width)
        self.keys, self.values = (torch.full(shape, math.nan, dtype=dtype) for _ in range(2))
        self.past = []
        for row, length in enumerate(lengths):
            k, v = (choose.noise(max(0, length - 1), kv_heads, width, seed=9 * row + i) for i in (1, 2))
            self.past.append((k.to(dtype), v.to(dtype)))
            for t in range(length - 1):
                at = block_tables[row, t // size], slice(None), t % size
                self.keys[at], self.values[at] = self.past[row][0][t], self.past[row][1][t]
        self.qkv = choose.noise(n, (heads + 2 * kv_heads) * width, seed=99).to(dtype)

    def triton(self) -> TritonDecode:
        return TritonDecode(len(self.qkv), self.pages, self.heads, self.kv_heads, self.width, CPU)

    def run(self, way: TorchDecode | TritonDecode, reach: Reach = FULL) -> Tensor:
        return way(self.qkv, self.keys, self.values, self.rows, self.width**-0.5, reach)

    def exact(self, row: int, window: int = 0, cap: float = 0.0, alibi: int = 0) -> Tensor:
        """Return the row's attention in float64."""
        H, KV = self.heads, self.kv_heads
        q, k, v = self.qkv[row].double().view(-1, self.width).split([H, KV, KV])
        past_k, past_v = (x[max(0, len(x) + 1 - window) if window else 0 :].double() for x in self.past[row])
        keys, values = (
            torch.cat((past, new[None])).repeat_interleave(H // KV, 1) for past, new in ((past_k, k), (past_v, v))
        )  # (t, H, D)
        scores = torch.einsum("hd,thd->ht", q, keys) * self.width**-0.5
        scores = cap * (scores / cap).tanh() if cap else scores
        if alibi:
            scores += slopes(alibi, H, CPU).double()[:, None] * torch.arange(1 - len(keys), 1)
        return torch.einsum("ht,thd->hd", scores.softmax(1), values).flatten()


LONG = [80, 3, 65, 0]  # joined from parts, and a row that is not used
FLOAT32 = torch.float32
DECODES = [  # lengths, heads, heads of keys and values, width, page size, format, reach
    *(([1, 16, 17, 0, 47], 2, 2, 64, 16, dtype, FULL) for dtype in DTYPES),
    ([21, 2], 1, 1, 8, 16, FLOAT32, FULL), ([21, 2], 3, 3, 24, 16, FLOAT32, FULL), ([133, 2], 2, 2, 64, 128, FLOAT32, FULL),
    *(([1, 17, 0, 33], *heads, 16, FLOAT32, FULL) for heads in ((6, 2, 64), (8, 1, 128), (4, 2, 24))),
    (LONG, 2, 2, 8, 16, FLOAT32, FULL),
    *((LONG, 6, 3, 24, 16, FLOAT32, reach) for reach in (Reach(alibi=2), Reach(40, 0.5, 4))),
    *((LONG, 2, 1, 24, 16, FLOAT32, Reach(*reach)) for reach in ((1, 0.5), (17, 0.5), (99, 1.0))),
]  # fmt: skip
MORE = [  # the same for other heads and in float16
    *(([1, 17, 0, 33], *heads, 16, torch.float16, FULL) for heads in ((6, 2, 64), (8, 1, 128), (4, 2, 24))),
    *((LONG, *heads, 24, 16, FLOAT32, Reach(40, 0.5, 4)) for heads in ((3, 3), (2, 1))),
    (LONG, 2, 1, 8, 16, FLOAT32, FULL),
    *(
        (LONG, 2, n, 24, 16, FLOAT32, Reach(*reach))
        for n in (1, 2)
        for reach in ((1, 0.5), (16, 1.0), (40, 2.0), (99, 1.0))
    ),
]


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "width", "size", "dtype", "reach"), points(len(DECODES), *DECODES, *MORE)
)
@pytest.mark.parametrize("way", ["torch", "triton"])
def test_decode_attention_is_float64s_and_reads_nothing_beside_a_rows_context(
    way: str, lengths: list[int], heads: int, kv_heads: int, width: int, size: int, dtype: torch.dtype, reach: Reach,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if lengths is LONG:
        monkeypatch.setattr("generate.gpu.triton_attention.MOST_PARTS", 2)
        monkeypatch.setattr("generate.gpu.attention.PLAIN_TOKENS", 100)  # one row at once
    case = Case(lengths, heads, width, size, dtype=dtype, kv_heads=kv_heads)
    for row, length in enumerate(lengths):
        if reach.window:
            case.rows.block_tables[row, : max(0, length - reach.window) // size] = 0  # given back: page 0 holds NaN
    out = case.run(TorchDecode() if way == "torch" else case.triton(), reach).double()
    bound = 1e-5 if dtype == FLOAT32 else choose.TOLERANCE[dtype]
    for row, length in enumerate(lengths):
        assert not length or (out[row] - case.exact(row, *reach)).abs().max() < bound


def test_slopes_are_those_of_the_paper_and_lie_between_for_other_heads() -> None:
    assert slopes(8, 8, CPU).tolist() == [2.0**-h for h in range(1, 9)]
    expected = [2.0**-h for h in (2, 4, 6, 8, 1, 3)]
    assert slopes(4, 6, CPU).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("heads", [2, 4])
def test_the_new_token_is_appended_where_it_belongs_and_nothing_else_is_written(heads: int) -> None:
    case = Case([17, 0], heads=heads, kv_heads=2)
    before = case.keys.clone()
    case.run(case.triton())
    page = case.rows.block_tables[0, 1]
    assert torch.equal(case.keys[page, :, 0].flatten(), case.qkv[0, -256:-128])
    assert torch.equal(case.values[page, :, 0].flatten(), case.qkv[0, -128:])
    case.keys[page, :, 0] = math.nan
    assert torch.equal(case.keys.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_rows_attention_is_the_same_to_the_bit_again_alone_and_in_a_batch(kv_heads: int) -> None:
    together = Case([33, 5, 48, 0, 20], kv_heads=kv_heads)
    way = together.triton()
    whole = together.run(way)
    assert torch.equal(together.run(way), whole)
    assert not way.arrived.any()
    for row in (0, 1, 2, 4):
        alone = Case([33, 5, 48, 0, 20], kv_heads=kv_heads)
        alone.rows, alone.qkv = DecodeRows(*(x[[row]] for x in alone.rows)), alone.qkv[[row]]
        assert torch.equal(alone.run(alone.triton())[0], whole[row])


def test_prompts_see_their_past_and_not_their_future() -> None:
    q, k, v = choose.noise(3, 30, 2, 8).double()
    whole = causal(q, k, v, 0.3)
    for i in (0, 7, 29):
        weights = (torch.einsum("hd,thd->ht", q[i], k[: i + 1]) * 0.3).softmax(1)
        assert (torch.einsum("ht,thd->hd", weights, v[: i + 1]) - whole[i]).abs().max() < 1e-12
    assert (causal(q[20:], k, v, 0.3) - whole[20:]).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "size", "dtype"),
    points(
        2,
        (2, 2, 64, 32, torch.float16), (4, 2, 24, 16, torch.float32), (2, 1, 128, 64, torch.float32),
        (2, 2, 64, 128, torch.float32), (4, 2, 24, 16, torch.float16), (2, 1, 128, 64, torch.float16),
        (2, 2, 64, 128, torch.float16),
    ),
)  # fmt: skip
def test_pieces_of_prompts_agree_with_plain_pytorch(
    heads: int, kv_heads: int, width: int, size: int, dtype: torch.dtype
) -> None:
    pool = torch.Size((9, kv_heads, size, width))
    for reach in (FULL, Reach(1), Reach(size + 3, 0.7), Reach(0, 0.0, 1), Reach(50, 1.0, 4)):
        error = choose.prompts_error(TritonPrompts(), TorchPrompts(), heads, pool, dtype, CPU, reach)
        assert error < choose.TOLERANCE[dtype]


@pytest.mark.parametrize("way", [TorchPrompts(), TritonPrompts()], ids=["torch", "triton"])
def test_pieces_of_prompts_agree_with_decodes_of_the_same_tokens(way: PromptAttention) -> None:
    case = Case([37, 18])
    decoded = case.run(TorchDecode())
    tables = [[*map(int, row)] for row in case.rows.block_tables]
    tiles, pages = cut([36, 17], [1, 1], tables, 16)
    pieces = Pieces(torch.tensor(tiles).view(-1, 4), torch.tensor(pages))
    assert (way(case.qkv, case.keys, case.values, pieces, 64**-0.5) - decoded).abs().max() < 1e-5


def test_where_a_prompt_is_cut_and_what_is_beside_it_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_in_one_order(monkeypatch)
    qkv = choose.noise(150, 3 * 2 * 16)

    def computed(*steps: list[tuple[int, int]]) -> Tensor:
        """Return the attention of two prompts of 100 and 50 tokens, after steps of pieces (prompt, tokens)."""
        keys, values = torch.full((2, 20, 2, 16, 16), math.nan)
        tables, bases, past, out = [[*range(1, 8)], [*range(9, 13)]], (0, 100), [0, 0], torch.zeros(150, 2 * 16)
        for members in steps:
            which, counts = zip(*members)
            before = [past[i] for i in which]
            tiles, pages = cut(before, counts, [tables[i] for i in which], 16)
            pieces = Pieces(torch.tensor(tiles).view(-1, 4), torch.tensor(pages))
            rows = torch.cat([bases[i] + torch.arange(a, a + n) for i, a, n in zip(which, before, counts)])
            out[rows] = TritonPrompts()(qkv[rows], keys, values, pieces, 0.25)
            for i, count in members:
                past[i] += count
        return out

    whole = computed([(0, 100)], [(1, 50)])
    assert torch.equal(computed([(1, 50), (0, 100)]), whole)
    assert torch.equal(computed([(0, 3), (1, 17)], [(0, 70)], [(1, 33), (0, 27)]), whole)


@pytest.mark.full
def test_the_kernels_compile_for_real_cards(pytestconfig: pytest.Config) -> None:
    """What has not changed since the last run is found in Triton's cache, which goes by the source."""
    assert pytestconfig.cache is not None
    environment = {**clean_environment(), "TRITON_CACHE_DIR": str(pytestconfig.cache.mkdir("triton"))}
    command = [sys.executable, "-m", "tests.generate.compile_kernels"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert len(kernels) == 56
    assert all(size > 1000 for size in kernels.values())
