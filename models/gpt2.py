"""GPT-2 as nanoGPT writes it.

`GPT` reads top to bottom and computes whole sequences with plain PyTorch. `dev/tools/train_bard.py` trains it, and the
tests trust it. The serving engine (`generate/runner.py`) takes its weights and computes the same function over packed
rows and KV pages. `models/weights.py` loads the weights.

It must not know HTTP, batching or scheduling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.activations import ACTIVATIONS
from models.architecture import Architecture
from models.gguf.block_matrix import as_tensor
from models.network import Block as NetworkBlock
from models.network import Network, Norm, Projection


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT-2 model; the defaults are gpt2-medium's."""

    block_size: int = 1024
    vocab_size: int = 50257
    n_layer: int = 24
    n_head: int = 16
    n_embd: int = 1024
    n_inner: int | None = None
    activation: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}. Use a GPT-2 checkpoint")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r} is not known. Use one of {', '.join(ACTIVATIONS)}")

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    @property
    def inner_size(self) -> int:
        return self.n_inner or 4 * self.n_embd

    @classmethod
    def of(cls, config: Architecture) -> GPTConfig:
        """Return the shape of a model that the engine describes. Raises ValueError unless it is a GPT-2."""
        if config.family != "gpt2":
            raise ValueError(f"the model is of family {config.family}, not a GPT-2. Use bard or a gpt2 model")
        return cls(
            config.block_size, config.vocab_size, config.n_layer, config.n_head, config.n_embd, config.inner_size,
            config.activation, config.norm_epsilon, config.scale_attention, config.scale_by_layer, config.tied,
        )  # fmt: skip

    @property
    def architecture(self) -> Architecture:
        """The description that the engine reads."""
        return Architecture(
            "gpt2", self.block_size, self.vocab_size, self.n_layer, self.n_embd, self.n_head, self.n_head,
            self.head_size, self.inner_size, "layer", self.layer_norm_epsilon, None, self.activation, False,
            qkv_bias=True, proj_bias=True, mlp_bias=True, tied=self.tie_word_embeddings,
            scale_attention=self.scale_attn_weights, scale_by_layer=self.scale_attn_by_inverse_layer_idx,
        )  # fmt: skip


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # query, key and value of all heads in one product
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.scale = config.architecture.attention_scale(layer)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, T, C) -> (B, H, T, D)
            for part in self.c_attn(x).split(C, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, C)  # all heads side by side again
        out: Tensor = self.resid_dropout(self.c_proj(y))
        return out


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.inner_size)
        self.c_proj = nn.Linear(config.inner_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(
            self.c_proj(self.activation(self.c_fc(x)))
        )  # (B, T, C) -> (B, T, inner) -> (B, T, C)
        return out


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


def _table(rows: int, width: int) -> nn.Embedding:
    # Given zeros, nn.Embedding draws no numbers. Drawing them on the meta device imports PyTorch's compiler for a second.
    return nn.Embedding(rows, width, _weight=torch.zeros(rows, width))


class Transformer(nn.Module):
    """Everything below the head, under the names of GPT-2's checkpoints."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = _table(config.vocab_size, config.n_embd)  # of tokens
        self.wpe = _table(config.block_size, config.n_embd)  # of positions
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)

    @property
    def blocks(self) -> Iterator[Block]:
        """Iterate over the blocks of `h`, whose type nn.ModuleList does not know."""
        return cast("Iterator[Block]", iter(self.h))


class GPT(nn.Module):
    """A GPT-2 language model with nanoGPT's names; `tie_word_embeddings` ties its head to `wte`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.transformer.wte.weight

    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Fill the weights as GPT-2 does: N(0, 0.02), residual projections by 1/sqrt(2 layers)."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif ".ln_" in name:
                nn.init.ones_(parameter)
            else:
                residual = name.endswith("c_proj.weight")
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if residual else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)

    def network(self) -> Network:
        """Return the weights in the engine's layout, which shares them."""

        def projection(layer: nn.Linear) -> Projection:
            return Projection(layer.weight.detach(), layer.bias.detach())

        def norm(layer: nn.LayerNorm) -> Norm:
            return Norm(layer.weight.detach(), layer.bias.detach())

        body = self.transformer
        embedding, head = body.wte.weight.detach(), self.lm_head.weight
        blocks = [
            NetworkBlock(
                norm(block.ln_1), projection(block.attn.c_attn), projection(block.attn.c_proj),
                norm(block.ln_2), projection(block.mlp.c_fc), projection(block.mlp.c_proj),
            )
            for block in body.blocks
        ]  # fmt: skip
        head = embedding if head is body.wte.weight else head.detach()
        return Network(self.config.architecture, embedding, body.wpe.weight.detach(), blocks, norm(body.ln_f), head)

    @classmethod
    def from_network(cls, network: Network) -> GPT:
        """Return a GPT that shares the weights of a GPT-2 in the engine's layout, for inference."""
        with torch.device("meta"):  # shapes without memory; every tensor is put in place below
            gpt = cls(GPTConfig.of(network.config))
        body = gpt.transformer
        parts: list[tuple[nn.Module, Norm | Projection]] = [(body.ln_f, network.norm)]
        for block, source in zip(body.blocks, network.blocks):
            parts += [
                (block.ln_1, source.norm_1), (block.attn.c_attn, source.qkv), (block.attn.c_proj, source.attn_proj),
                (block.ln_2, source.norm_2), (block.mlp.c_fc, source.fc), (block.mlp.c_proj, source.mlp_proj),
            ]  # fmt: skip
        for module, part in parts:
            module.weight, module.bias = (nn.Parameter(cast(Tensor, t), requires_grad=False) for t in part)
        assert network.positions is not None
        body.wte.weight = nn.Parameter(network.embedding, requires_grad=False)
        body.wpe.weight = nn.Parameter(network.positions, requires_grad=False)
        tied = network.head is network.embedding
        gpt.lm_head.weight = body.wte.weight if tied else nn.Parameter(as_tensor(network.head), requires_grad=False)
        return gpt.eval()

    def hidden(self, idx: Tensor, position: int = 0) -> Tensor:
        """Return the final hidden states (B, T, C) of token ids (B, T), the first at `position`."""
        T = idx.shape[1]
        if position + T > self.config.block_size:
            raise ValueError(f"{position + T} tokens exceed the context of {self.config.block_size}. Shorten the text")
        body = self.transformer
        positions = torch.arange(position, position + T, device=idx.device)  # (T)
        x: Tensor = body.drop(body.wte(idx) + body.wpe(positions))  # (B, T, C) + (T, C)
        for block in body.h:
            x = block(x)
        x = body.ln_f(x)
        return x

    def forward(self, idx: Tensor, targets: Tensor | None = None, position: int = 0) -> tuple[Tensor, Tensor | None]:
        """Return logits and loss of token ids (B, T).

        Without targets: logits (B, 1, V) of the last position, loss None. With targets (B, T), in which -1 is
        ignored: logits (B, T, V) and the mean cross entropy in nats per token.
        """
        x = self.hidden(idx, position)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None  # (B, 1, V): a list as index keeps the dimension
        logits = self.lm_head(x)  # (B, T, V)
        flat = logits.float().view(-1, logits.shape[-1])  # (B * T, V)
        return logits, F.cross_entropy(flat, targets.reshape(-1), ignore_index=-1)
