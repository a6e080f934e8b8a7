"""Small random networks in the shapes of the families, for tests of the engine."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from models.architecture import Architecture, Llama3Scaling, Rope
from models.network import Block, Network, Norm, Projection

LLAMA = Architecture(
    family="llama", block_size=256, vocab_size=211, n_layer=2, n_embd=96, n_head=6, n_kv_head=2, head_size=64,
    inner_size=136, norm="rms", norm_epsilon=1e-5, rope=Rope(), activation="silu", gated=True,
)  # fmt: skip
ARCHITECTURES = {
    "llama, 3 heads to 1": LLAMA,
    "llama, 1 to 1, own head": replace(LLAMA, n_head=2, n_kv_head=2, tied=False),
    "llama, 8 to 1, heads of 128, stretched": replace(
        LLAMA, n_head=8, n_kv_head=1, head_size=128, rope=Rope(theta=5e5, llama3=Llama3Scaling(8.0, 1.0, 4.0, 64))
    ),
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True),
    "qwen3": replace(LLAMA, family="qwen3", n_head=4, n_kv_head=2, qk_norm=True, rope=Rope(theta=1e6)),
    "layer norms, gelu, rotated, biases": replace(
        LLAMA, norm="layer", activation="gelu_new", gated=False, qkv_bias=True, proj_bias=True, mlp_bias=True
    ),
}


def random_network(config: Architecture, dtype: torch.dtype = torch.float32, seed: int = 5) -> Network:
    """Return a network all of whose tensors are random: none can be left out unnoticed."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, std: float = 0.2, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * std + mean).to(dtype)

    def norm(width: int) -> Norm:
        return Norm(random(width, mean=1.0), random(width) if config.norm == "layer" else None)

    def projection(rows: int, columns: int, has_bias: bool) -> Projection:
        return Projection(random(rows, columns), random(rows) if has_bias else None)

    C, D, inner = config.n_embd, config.head_size, config.inner_size
    blocks = [
        Block(
            norm(C), projection(config.qkv_size, C, config.qkv_bias),
            projection(C, config.n_head * D, config.proj_bias),
            norm(C), projection(inner * (1 + config.gated), C, config.mlp_bias),
            projection(C, inner, config.mlp_bias),
            *((Norm(random(D, mean=1.0)), Norm(random(D, mean=1.0))) if config.qk_norm else ()),
        )
        for _ in range(config.n_layer)
    ]  # fmt: skip
    embedding = random(config.vocab_size, C)
    positions = None if config.rope else random(config.block_size, C)
    head = embedding if config.tied else random(config.vocab_size, C)
    return Network(config, embedding, positions, blocks, norm(C), head)
