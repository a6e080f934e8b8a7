"""All blocks in one call of C are the blocks one by one."""

from __future__ import annotations

import pytest
import torch
from kernels import why_no_kernel

from generate.cpu.attention import CAttention, PackedRows
from generate.cpu.blocks import CBlocks, LayeredBlocks, make_blocks
from generate.cpu.linear import kernel_runs
from models.gpt2 import GPT, GPTConfig
from models.network import Network

CONFIG = GPTConfig(block_size=256, vocab_size=99, n_layer=3, n_head=2, n_embd=128)

needs_kernel = pytest.mark.skipif(not kernel_runs(), reason=why_no_kernel())


def make(config: GPTConfig) -> tuple[CBlocks | LayeredBlocks, Network, torch.Tensor, torch.Tensor]:
    model = GPT(config)
    model.init_weights(torch.Generator().manual_seed(1))
    model = model.bfloat16().eval().requires_grad_(False)
    shape = (config.n_layer, 8, config.n_head, 64, config.head_size)
    keys, values = torch.zeros(shape).bfloat16(), torch.zeros(shape).bfloat16()
    body = model.network()
    blocks = make_blocks(body, CAttention(torch.bfloat16), keys, values)
    return blocks, body, keys, values  # type: ignore[return-value]


def tokens(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 99, (n,), generator=generator), torch.arange(n) % 70


def rows(counts: list[int], lengths: list[int]) -> PackedRows:
    cu_seqlens = [sum(counts[:i]) for i in range(len(counts) + 1)]
    block_tables = [[1 + 2 * i, 2 + 2 * i] for i in range(len(counts))]
    return PackedRows(*(torch.tensor(x, dtype=torch.int32) for x in (cu_seqlens, lengths, block_tables)))


@needs_kernel
def test_one_call_gives_what_the_layers_give() -> None:
    together, body, keys, values = make(CONFIG)
    assert isinstance(together, CBlocks)
    blocks = together.keep[0]
    step = rows([5, 70], [5, 70])
    ids, positions = tokens(75, seed=2)
    for sample_rows in (None, torch.tensor([4, 74])):
        found = together(ids, positions, step, sample_rows)
        first_keys = keys.clone()
        one_by_one = LayeredBlocks(body, blocks, together.attend, keys, values)
        expected = one_by_one(ids, positions, step, sample_rows)
        assert found.shape == (75 if sample_rows is None else 2, 128)
        assert torch.allclose(found.float(), expected.float(), atol=0.05, rtol=0.02)
        assert torch.allclose(first_keys.float(), keys.float(), atol=0.05, rtol=0.02)


@needs_kernel
def test_a_row_is_the_same_alone_and_among_others() -> None:
    together, _, keys, values = make(CONFIG)
    ids, positions = tokens(90, seed=3)
    whole = together(ids, positions, rows([20, 70], [20, 70]), None)
    keys.zero_()
    values.zero_()
    alone = together(ids[:20], positions[:20], rows([20], [20]), None)
    assert torch.equal(alone, whole[:20])


@needs_kernel
def test_a_page_outside_the_pool_is_refused() -> None:
    together, *_ = make(CONFIG)
    step = rows([3], [3])
    step.block_tables[0, 0] = 800
    with pytest.raises(ValueError, match="page"):
        together(*tokens(3, seed=4), step, None)


@needs_kernel
def test_an_activation_without_a_kernel_goes_layer_by_layer() -> None:
    config = GPTConfig(block_size=64, vocab_size=9, n_layer=1, n_head=1, n_embd=64, activation="relu")
    assert isinstance(make(config)[0], LayeredBlocks)
