"""GPT-2 between token ids and logits, with the residual in float32 and attention as an argument.

`PlainMath` is plain PyTorch on any device, the oracle; `FusedMath` uses fewer kernels on a GPU. Decodes and prompts go
through the same layers, and nothing here reads a number back, so that a graph can hold all of it.

It must not know pages, requests or sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from generate.cpu.linear import GELU_TANH_NAMES
from models import network
from models.activations import ACTIVATIONS

VOCABULARY_MULTIPLE = 64  # a product whose width is odd takes a slower kernel
Attend = Callable[[int, Tensor, float], Tensor]  # layer, qkv [n, 3C], scale: attention [n, C]


class Layer(NamedTuple):
    """A linear layer and its activation; weight (out, in)."""

    weight: Tensor
    bias: Tensor | None
    activation: str = ""


class Norm(NamedTuple):
    """A layer norm, its weight and bias in float32."""

    weight: Tensor
    bias: Tensor
    eps: float


class PlainMath:
    """PyTorch's own operations, one after the other."""

    name = "torch"

    def add_norm(self, residual: Tensor, x: Tensor | None, norm: Norm, dtype: torch.dtype) -> Tensor:
        """Add x to the float32 residual in place; return the sum's layer norm as `dtype`."""
        if x is not None:
            residual.add_(x)
        return F.layer_norm(residual, residual.shape[1:], norm.weight, norm.bias, norm.eps).to(dtype)

    def linear(self, x: Tensor, layer: Layer) -> Tensor:
        """Return activation(x W + b) as x's dtype."""
        y = F.linear(x, layer.weight, layer.bias)
        return ACTIVATIONS[layer.activation](y) if layer.activation else y

    def prepare_head(self, weight: Tensor) -> Tensor:
        """Return the head's weight in the layout of `head`."""
        return weight.float()

    def head(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return float32 logits of x [n, C]; they may be wider than the vocabulary."""
        return x.float() @ weight.t()


class FusedMath(PlainMath):
    """Fewer kernels on a GPU: residual and norm in one, the activation with its product, a padded head."""

    name = "fused"

    def __init__(self) -> None:
        from generate.gpu import triton_layers

        self.kernels = triton_layers

    def add_norm(self, residual: Tensor, x: Tensor | None, norm: Norm, dtype: torch.dtype) -> Tensor:
        return self.kernels.add_norm(residual, x, *norm, dtype)

    def linear(self, x: Tensor, layer: Layer) -> Tensor:
        if layer.activation in GELU_TANH_NAMES:
            assert layer.bias is not None
            y: Tensor = torch._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=True)
            return y
        return super().linear(x, layer)

    def prepare_head(self, weight: Tensor) -> Tensor:
        return F.pad(weight, (0, 0, 0, -len(weight) % VOCABULARY_MULTIPLE))

    def head(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return x @ weight.t()
        logits: Tensor = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return logits


class StrictMath(FusedMath):
    """One kernel with one order of sums for any number of rows: a row's bits do not depend on the other rows.

    cuBLAS chooses kernels by the number of rows, and its bits change with them.
    """

    name = "strict"

    def linear(self, x: Tensor, layer: Layer) -> Tensor:
        fused = layer.activation in GELU_TANH_NAMES
        y = self.kernels.linear(x, layer.weight, layer.bias, gelu=fused)
        return y if fused or not layer.activation else ACTIVATIONS[layer.activation](y)

    def prepare_head(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    def head(self, x: Tensor, weight: Tensor) -> Tensor:
        logits: Tensor = self.kernels.linear(x, weight, None, out_dtype=torch.float32)
        return logits


class Block(NamedTuple):
    ln_1: Norm
    c_attn: Layer
    scale: float
    attn_proj: Layer
    ln_2: Norm
    c_fc: Layer
    mlp_proj: Layer


class Network:
    """The layers of a model in the order of a step. Raises ValueError for an architecture other than GPT-2's."""

    def __init__(self, model: network.Network, make_math: Callable[[str], PlainMath]) -> None:
        config = model.config
        if config.family != "gpt2" or model.positions is None:
            raise ValueError(f"the engine cannot compute {config.family} on a GPU. Use a GPT-2 model")
        self.math = math = make_math(config.activation)
        self.vocabulary = config.vocab_size
        self.wte, self.wpe = model.embedding, model.positions
        self.dtype = self.wte.dtype

        def norm(part: network.Norm) -> Norm:
            assert part.bias is not None
            return Norm(part.weight.float(), part.bias.float(), config.norm_epsilon)

        def layer(part: network.Projection, activation: str = "") -> Layer:
            return Layer(part.weight.contiguous(), part.bias, activation)

        self.blocks = [
            Block(
                norm(block.norm_1), layer(block.qkv), config.attention_scale(i), layer(block.attn_proj),
                norm(block.norm_2), layer(block.fc, config.activation), layer(block.mlp_proj),
            )
            for i, block in enumerate(model.blocks)
        ]  # fmt: skip
        self.ln_f = norm(model.norm)
        self.lm_head = math.prepare_head(model.head)

    def logits(self, ids: Tensor, positions: Tensor, attend: Attend, sample_rows: Tensor | None = None) -> Tensor:
        """Return float32 logits [n, V] of tokens `ids` at `positions`, or only those of `sample_rows`."""
        math, dtype = self.math, self.dtype
        residual = F.embedding(ids, self.wte).float() + F.embedding(positions, self.wpe)  # [n, C]
        x = None  # each add_norm adds the layer before it to the residual
        for i, block in enumerate(self.blocks):
            qkv = math.linear(math.add_norm(residual, x, block.ln_1, dtype), block.c_attn)  # [n, 3C]
            x = math.linear(attend(i, qkv, block.scale), block.attn_proj)  # [n, C]
            x = math.linear(math.add_norm(residual, x, block.ln_2, dtype), block.c_fc)  # [n, inner]
            x = math.linear(x, block.mlp_proj)  # [n, C]
        if sample_rows is not None and x is not None:
            if not len(sample_rows):  # a launch for no rows is an error
                return residual.new_empty(0, self.vocabulary)
            residual, x = residual[sample_rows], x[sample_rows]
        x = math.add_norm(residual, x, self.ln_f, dtype)
        return math.head(x, self.lm_head)[:, : self.vocabulary]
