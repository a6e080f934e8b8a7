"""What tests of the engine share: sequences on scattered pages of NaN, and small random networks."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import policies
from generate.cpu import kernels
from generate.cpu.adapters import AdapterRows
from generate.cpu.attention import Attention, PackedRows, stale
from generate.memory import kv_row_size
from generate.params import SamplingParams
from generate.runner import ModelRunner
from model import GPT, GPTConfig
from models.architecture import FULL, Architecture, Llama3Scaling, Rope
from models.network import Block, Network, Norm, Projection
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence

# bfloat16: its own rounding of weights and results; 8-bit pools: queries and weights are rounded to 15 bits
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.int8: 5e-4}
NAN = math.nan
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
    "smollm3, a layer without positions": replace(LLAMA, unrotated=frozenset({0})),
    "olmo2": replace(LLAMA, norm_after=True, qk_norm=True, whole_qk_norm=True),
    "mistral, a window of 20": replace(LLAMA, window=20, windowed=frozenset({0, 1})),
    "qwen2, a layer with a window": replace(LLAMA, qkv_bias=True, window=70, windowed=frozenset({1})),
    "gpt_neox": replace(
        LLAMA,
        norm="layer",
        activation="gelu_new",
        gated=False,
        qkv_bias=True,
        proj_bias=True,
        mlp_bias=True,
        n_kv_head=6,
        parallel=True,
        rope=Rope(part=0.25),
    ),
    "layer norms, gelu, rotated, biases": replace(
        LLAMA, norm="layer", activation="gelu_new", gated=False, qkv_bias=True, proj_bias=True, mlp_bias=True
    ),
}
SHAPES = {
    "heads of 64": GPTConfig(block_size=256, vocab_size=301, n_layer=2, n_head=2, n_embd=128),
    "heads of 8": GPTConfig(block_size=192, vocab_size=97, n_layer=3, n_head=4, n_embd=32),
    "relu, own width": GPTConfig(
        block_size=128, vocab_size=65, n_layer=2, n_head=2, n_embd=64, n_inner=96, activation="relu"
    ),
    "scaled by layer": GPTConfig(
        block_size=128, vocab_size=65, n_layer=2, n_head=1, n_embd=64, scale_attn_by_inverse_layer_idx=True,
        tie_word_embeddings=False,
    ),
}  # fmt: skip


class World:
    """Pools full of NaN, sequences whose pages lie in random order, and a scripted way to feed their tokens."""

    reach = FULL

    def __init__(
        self,
        lengths: list[int],
        H: int,
        D: int,
        P: int,
        dtype: torch.dtype,
        seed: int = 0,
        KV: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.H, self.KV, self.D, self.P, self.dtype = H, KV or H, D, P, dtype
        self.kv_dtype = kv_dtype or dtype
        counts = [math.ceil(length / P) for length in lengths]
        order = torch.randperm(sum(counts) + 2, generator=self.generator).tolist()
        self.block_tables = torch.full((len(lengths), max(counts) + 1), -7, dtype=torch.int32)
        for i, count in enumerate(counts):
            self.block_tables[i, :count] = torch.tensor([order.pop() for _ in range(count)])
        self.pages = sum(counts) + 2
        self.width = (H + 2 * self.KV) * D
        self.tokens = [torch.randn(length, self.width, generator=self.generator).to(dtype) for length in lengths]
        self.clear()

    def clear(self) -> None:
        self.done = [0] * len(self.tokens)
        shape = (self.pages, self.KV, self.P, kv_row_size(self.D, self.kv_dtype))
        self.keys, self.values = (stale(shape, self.kv_dtype) for _ in range(2))

    def step(self, attention: Attention, new: dict[int, int], padding: int = 0) -> dict[int, Tensor]:
        """Feed new[i] further tokens of sequence i in one call and return its rows [new[i], H * D]."""
        parts, cu_seqlens, context_lens = [], [0], []
        for i, count in new.items():
            parts.append(self.tokens[i][self.done[i] : self.done[i] + count])
            self.done[i] += count
            cu_seqlens.append(cu_seqlens[-1] + count)
            context_lens.append(self.done[i])
        parts.append(torch.full((padding, self.width), NAN, dtype=self.dtype))
        rows = PackedRows(
            torch.tensor(cu_seqlens, dtype=torch.int32),
            torch.tensor(context_lens, dtype=torch.int32),
            self.block_tables[list(new)].contiguous(),
        )
        qkv, scale = torch.cat(parts), self.D**-0.5
        out = attention(qkv, self.keys, self.values, rows, scale, self.reach)
        assert out.shape == (len(qkv), self.H * self.D)
        assert out.dtype == self.dtype
        assert out[cu_seqlens[-1] :].isfinite().all()
        return {i: out[a:b] for i, a, b in zip(new, cu_seqlens, cu_seqlens[1:])}

    def run(self, attention: Attention, steps: list[dict[int, int]], padding: int = 0) -> list[Tensor]:
        """Clear the pools, run all steps, return each sequence's rows together."""
        self.clear()
        rows: list[list[Tensor]] = [[] for _ in self.tokens]
        for new in steps:
            for i, part in self.step(attention, new, padding).items():
                rows[i].append(part)
        return [torch.cat(parts) if parts else torch.empty(0) for parts in rows]


def assert_close(
    got: list[Tensor], expected: list[Tensor], dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> None:
    """Hold rows to be equal but for rounding; a number halfway between two of 8 bits may become either."""
    atol = max(TOLERANCE[dtype], TOLERANCE[kv_dtype or dtype])
    for one, other in zip(got, expected, strict=True):
        if kv_dtype == torch.int8:
            differ = (one.float() - other.float()).abs() > atol + 0.01 * other.float().abs()
            assert differ.float().mean() < 1e-4
        most = atol + 0.01 * (kv_dtype == torch.int8)
        torch.testing.assert_close(one.float(), other.float(), rtol=0.01, atol=most)


def multiply_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter sum every row of a tile alike, as a GPU does: the BLAS it calls does not."""

    def matmul(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
        return np.einsum("mk,kn->mn", a, b, dtype=dtype)

    monkeypatch.setattr("triton.runtime.interpreter.np.matmul", matmul)


def random_network(
    config: Architecture, dtype: torch.dtype = torch.float32, seed: int = 5, std: float | None = 0.2
) -> Network:
    """Return a network all of whose tensors are random: none can be left out unnoticed.

    Without `std`, sums have about the size of what is summed up. Only layer norms beside biased projections have a bias.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, mean: float = 0.0) -> Tensor:
        scale = shape[-1] ** -0.5 if std is None else std
        return (torch.randn(shape, generator=generator) * scale + mean).to(dtype)

    def norm(width: int) -> Norm:
        return Norm(random(width, mean=1.0), random(width) if config.norm == "layer" and config.qkv_bias else None)

    def projection(rows: int, columns: int, has_bias: bool) -> Projection:
        return Projection(random(rows, columns), random(rows) if has_bias else None)

    C, D, inner = config.n_embd, config.head_size, config.inner_size
    whole = config.n_head * D, config.n_kv_head * D
    norms = () if not config.qk_norm else whole if config.whole_qk_norm else (D, D)
    blocks = [
        Block(
            norm(C), projection(config.qkv_size, C, config.qkv_bias),
            projection(C, config.n_head * D, config.proj_bias),
            norm(C), projection(inner * (1 + config.gated), C, config.mlp_bias),
            projection(C, inner, config.mlp_bias),
            *(Norm(random(width, mean=1.0)) for width in norms),
        )
        for _ in range(config.n_layer)
    ]  # fmt: skip
    embedding = random(config.vocab_size, C)
    positions = None if config.rope else random(config.block_size, C)
    head = embedding if config.tied else random(config.vocab_size, C)
    return Network(config, embedding, positions, blocks, norm(C), head)


def pieces(lengths: list[int], seed: int) -> list[dict[int, int]]:
    """Return steps that feed all sequences in pieces of random sizes, decodes among them."""
    rng, left, steps = random.Random(seed), dict(enumerate(lengths)), []
    while left:
        members = rng.sample(sorted(left), rng.randint(1, len(left)))
        steps.append({i: min(left[i], rng.choice([1, 1, 2, 7, 40, 200])) for i in members})
        left = {i: n - steps[-1].get(i, 0) for i, n in left.items() if n > steps[-1].get(i, 0)}
    return steps


def logits_of(runner: ModelRunner, prompts: list[list[int]], adapters: AdapterRows | None = None) -> list[Tensor]:
    """Return the logits after each token of prompts that are computed in one step."""
    lengths = [len(prompt) for prompt in prompts]
    most = -(-max(lengths) // runner.page_size)
    starts, tables = torch.tensor([0, *lengths]).cumsum(0), torch.arange(1, 1 + most * len(prompts)).view(-1, most)
    rows = PackedRows(*(part.int() for part in (starts, torch.tensor(lengths), tables)), adapters)
    ids = torch.tensor([token for prompt in prompts for token in prompt])
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.inference_mode():
        return [*runner.compute(ids, positions, rows, range(len(ids)))[0].split(lengths)]


def need_compiler() -> None:
    """Skip the test where no C compiler is installed."""
    try:
        kernels.find_compiler()
    except kernels.KernelError as error:
        pytest.skip(str(error))


def make_model(config: GPTConfig, dtype: torch.dtype = torch.float32, seed: int = 5, factor: float = 4) -> GPT:
    """Return a random model, sharper than at birth by `factor`, so that greedy text is not one token for ever."""
    model = GPT(config).eval().requires_grad_(False)
    model.init_weights(torch.Generator().manual_seed(seed))
    for parameter in model.parameters():
        parameter.mul_(factor if parameter.dim() > 1 else 1)
    return model.to(dtype)


def ragged(config: GPTConfig, n: int, seed: int, **sampling: Any) -> list[Sequence]:
    rng = random.Random(seed)
    result = []
    for i in range(n):
        prompt = [rng.randrange(config.vocab_size) for _ in range(rng.randrange(1, 90))]
        params = SamplingParams(**{"seed": i, **sampling})
        result.append(Sequence(prompt, rng.randrange(1, 30), id=str(i), sampling=params))
    return result


def run(
    model: GPT | None,
    sequences: list[Sequence],
    policy: str = "dynamic",
    slots: int = 8,
    budget: int = 2048,
    arrivals: int = 3,
    prefix_cache: bool = True,
    pages: int = 120,
    runner: ModelRunner | None = None,
) -> list[list[int]]:
    """Serve `sequences`, `arrivals` new ones before each step; return their tokens."""
    pool = PagePool(pages, 64, prefix_cache=prefix_cache)
    runner = runner or ModelRunner(model, pages, 64)
    scheduler = Scheduler(policies.get_policy(policy, max_batch_size=slots), pool, budget)
    waiting = list(sequences)
    while waiting or not scheduler.is_idle:
        for seq in waiting[:arrivals]:
            scheduler.add(seq)
        waiting = waiting[arrivals:]
        scheduler.step(runner.forward, lambda: 0.0)
    assert pool.used == 0
    return [seq.output_ids for seq in sequences]


class Counting(ModelRunner):
    """A runner that counts the steps that it packs."""

    packed = 0

    def _pack(self, *args: Any) -> Any:
        self.packed += 1
        return super()._pack(*args)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return random numbers of this shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
