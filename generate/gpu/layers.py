"""GPT-2 between token ids and logits, with the residual in float32 and attention left to whoever calls.

`PlainMath` is PyTorch's on any device, the oracle; `FusedMath` joins what a GPU can do in one kernel. Decodes and
prompts go through the same layers, and nothing here reads a number back, so that a graph can hold all of it.

It must not know pages, requests or sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from generate.cpu.linear import GELU_TANH_NAMES
from models.gpt2 import ACTIVATIONS, GPT

VOCABULARY_MULTIPLE = 64  # a product whose width is odd takes a slower kernel
Attend = Callable[[int, Tensor, float], Tensor]  # layer, qkv [n, 3C], scale: attention [n, C]


class Layer(NamedTuple):
    """A linear layer and what follows it: weight (out, in)."""

    weight: Tensor
    bias: Tensor
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
        """Return the head's weight as `head` wants it."""
        return weight.float()

    def head(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return float32 logits of x [n, C]; they may be wider than the vocabulary."""
        return x.float() @ weight.t()


class FusedMath(PlainMath):
    """What a GPU does in fewer kernels: residual and norm, the activation with its product, a wide head."""

    name = "fused"

    def __init__(self) -> None:
        from generate.gpu import triton_layers

        self.kernels = triton_layers

    def add_norm(self, residual: Tensor, x: Tensor | None, norm: Norm, dtype: torch.dtype) -> Tensor:
        return self.kernels.add_norm(residual, x, *norm, dtype)

    def linear(self, x: Tensor, layer: Layer) -> Tensor:
        if layer.activation in GELU_TANH_NAMES:
            return torch._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=True)
        return super().linear(x, layer)

    def prepare_head(self, weight: Tensor) -> Tensor:
        return F.pad(weight, (0, 0, 0, -len(weight) % VOCABULARY_MULTIPLE))

    def head(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return x @ weight.t()
        return torch.mm(x, weight.t(), out_dtype=torch.float32)


class StrictMath(FusedMath):
    """One kernel with one order of sums for any number of rows: a row's numbers are its own to the bit.

    cuBLAS takes other kernels for other numbers of rows, and its bits change with them.
    """

    name = "strict"

    def linear(self, x: Tensor, layer: Layer) -> Tensor:
        fused = layer.activation in GELU_TANH_NAMES
        y = self.kernels.linear(x, layer.weight, layer.bias, gelu=fused)
        return y if fused or not layer.activation else ACTIVATIONS[layer.activation](y)

    def prepare_head(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    def head(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.kernels.linear(x, weight, None, out_dtype=torch.float32)


class Block(NamedTuple):
    ln_1: Norm
    c_attn: Layer
    scale: float
    attn_proj: Layer
    ln_2: Norm
    c_fc: Layer
    mlp_proj: Layer


class Network:
    """The layers of a GPT in the order of a step."""

    def __init__(self, model: GPT, math: PlainMath) -> None:
        body, config = model.transformer, model.config
        self.math = math
        self.vocabulary = config.vocab_size
        self.wte, self.wpe = body.wte.weight, body.wpe.weight
        self.dtype = self.wte.dtype
        self.blocks = [
            Block(
                _norm(block.ln_1), _layer(block.attn.c_attn), config.attention_scale(i),
                _layer(block.attn.c_proj), _norm(block.ln_2),
                _layer(block.mlp.c_fc, config.activation), _layer(block.mlp.c_proj),
            )
            for i, block in enumerate(body.h)
        ]  # fmt: skip
        self.ln_f = _norm(body.ln_f)
        self.lm_head = math.prepare_head(model.lm_head.weight)

    def logits(self, ids: Tensor, places: Tensor, attend: Attend, due: Tensor | None = None) -> Tensor:
        """Return float32 logits [n, V] of tokens `ids` at `places`, or of the rows that are `due` alone."""
        math, dtype = self.math, self.dtype
        residual = F.embedding(ids, self.wte).float() + F.embedding(places, self.wpe)
        x = None
        for i, block in enumerate(self.blocks):
            qkv = math.linear(math.add_norm(residual, x, block.ln_1, dtype), block.c_attn)
            x = math.linear(attend(i, qkv, block.scale), block.attn_proj)
            x = math.linear(math.add_norm(residual, x, block.ln_2, dtype), block.c_fc)
            x = math.linear(x, block.mlp_proj)
        if due is not None and x is not None:
            if not len(due):  # a launch for no rows is an error
                return residual.new_empty(0, self.vocabulary)
            residual, x = residual[due], x[due]
        x = math.add_norm(residual, x, self.ln_f, dtype)
        return math.head(x, self.lm_head)[:, : self.vocabulary]


def _norm(module: nn.Module) -> Norm:
    return Norm(module.weight.float(), module.bias.float(), module.eps)


def _layer(module: nn.Module, activation: str = "") -> Layer:
    return Layer(module.weight.contiguous(), module.bias, activation)
