"""All blocks in one call of C are the blocks one by one, whatever the switches of the architecture."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from generate.cpu import linear
from generate.cpu.attention import CAttention, PackedRows, TorchAttention
from generate.cpu.blocks import CBlocks, LayeredBlocks, make_blocks
from generate.cpu.linear import kernel_runs
from models.architecture import Architecture, Rope
from models.network import Network
from tests.support.generate import random_network

BIASED = {"qkv_bias": True, "proj_bias": True, "mlp_bias": True}
GPT2 = Architecture(
    "gpt2", 256, 99, 3, 128, 2, 2, 64, 512, "layer", 1e-5, None, "gelu_new", gated=False, **BIASED
)  # fmt: skip
LLAMA = Architecture(
    "llama", 256, 99, 2, 192, 9, 3, 64, 160, "rms", 1e-5, Rope(100_000.0), "silu", gated=True, tied=False
)  # fmt: skip
SHAPES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "qwen2": replace(LLAMA, n_head=4, n_kv_head=2, head_size=48, qkv_bias=True),
    "qwen3": replace(LLAMA, n_head=4, n_kv_head=1, head_size=128, qk_norm=True),
    "smollm3": replace(LLAMA, unrotated=frozenset({1})),
    "olmo2": replace(LLAMA, norm_after=True, qk_norm=True, whole_qk_norm=True),
    "norm-after-wide": replace(LLAMA, n_embd=640, norm_after=True),
    "gpt_neox": replace(GPT2, rope=Rope(part=0.25), parallel=True),
    "falcon": replace(LLAMA, n_kv_head=1, norm="layer", gated=False, activation="gelu", parallel=True, one_norm=True),
    "plain-mlp": replace(LLAMA, n_kv_head=9, gated=False, activation="gelu_pytorch_tanh"),
    "biases-and-odd-sizes": replace(LLAMA, n_embd=70, n_head=8, n_kv_head=1, head_size=6, inner_size=46, **BIASED),
    "learned-positions": replace(LLAMA, rope=None),
    "layer-norm-without-bias": replace(LLAMA, norm="layer", n_head=8, n_kv_head=2),
}

pytestmark = pytest.mark.usefixtures("one_thread")
needs_kernel = pytest.mark.skipif(not kernel_runs(), reason="needs a C compiler")


def network_of(config: Architecture) -> Network:
    return random_network(config, torch.bfloat16, std=None)


def pools(config: Architecture, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (config.n_layer, 8, config.n_kv_head, 64, config.head_size)
    return torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)


def make(config: Architecture) -> CBlocks:
    blocks = make_blocks(network_of(config), CAttention(torch.bfloat16), *pools(config))
    assert isinstance(blocks, CBlocks)
    return blocks


def tokens(*counts: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random ids and the positions of sequences of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 99, (sum(counts),), generator=generator), torch.cat([torch.arange(n) for n in counts])


def rows(counts: list[int], lengths: list[int]) -> PackedRows:
    cu_seqlens = [sum(counts[:i]) for i in range(len(counts) + 1)]
    block_tables = [[1 + 2 * i, 2 + 2 * i] for i in range(len(counts))]
    return PackedRows(*(torch.tensor(x, dtype=torch.int32) for x in (cu_seqlens, lengths, block_tables)))


@needs_kernel
@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_one_call_gives_what_plain_layers_give_in_float32(config: Architecture) -> None:
    together = make(config)
    network = network_of(config).to(torch.float32)
    plain = make_blocks(network, TorchAttention(), *pools(config, torch.float32))
    assert isinstance(plain, LayeredBlocks)
    ids, positions = tokens(5, 70, seed=2)
    for sample_rows in (None, torch.tensor([4, 74])):
        found = together(ids, positions, rows([5, 70], [5, 70]), sample_rows).float()
        expected = plain(ids, positions, rows([5, 70], [5, 70]), sample_rows)
        assert found.shape == (75 if sample_rows is None else 2, config.n_embd)
        assert (found - expected).abs().max() < 0.1 * expected.std()
        assert (found - expected).std() < 0.015 * expected.std()


@needs_kernel
def test_the_layers_one_by_one_use_the_same_weights() -> None:
    together = make(LLAMA)
    network = network_of(LLAMA)
    one_by_one = LayeredBlocks(network, together.blocks, together.attend, *pools(LLAMA))
    ids, positions = tokens(70, seed=2)
    found = together(ids, positions, rows([70], [70]), None).float()
    assert (one_by_one(ids, positions, rows([70], [70]), None) - found).std() < 0.015 * found.std()


@needs_kernel
def test_a_page_outside_the_pool_is_refused() -> None:
    step = rows([3], [3])
    step.block_tables[0, 0] = 800
    with pytest.raises(ValueError, match="page"):
        make(GPT2)(*tokens(3, seed=4), step, None)


@needs_kernel
@pytest.mark.parametrize(
    "changes",
    [{"activation": "relu"}, {"gated": True, "activation": "gelu"}, {"n_embd": 65}, {"inner_size": 33}],
    ids=str,
)
def test_what_c_does_not_compute_goes_layer_by_layer(changes: dict[str, object]) -> None:
    config = replace(GPT2, **changes)  # type: ignore[arg-type]
    blocks = make_blocks(network_of(config), CAttention(torch.bfloat16), *pools(config))
    assert isinstance(blocks, LayeredBlocks)
    assert blocks(*tokens(3, seed=4), rows([3], [3]), None).isfinite().all()


@pytest.mark.parametrize("config", [LLAMA, SHAPES["qwen3"]], ids=["llama", "qwen3"])
def test_without_kernels_the_layers_give_the_same(config: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "kernel_runs", lambda: False)
    ids, positions = tokens(40, seed=2)
    found, expected = (
        make_blocks(network_of(config).to(dtype), TorchAttention(), *pools(config, dtype))(
            ids, positions, rows([40], [40]), None
        ).float()
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert (found - expected).std() < 0.02 * expected.std()
