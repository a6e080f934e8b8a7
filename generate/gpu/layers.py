"""A model between token ids and logits, for any architecture, with the residual in float32 and attention as an argument.

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

from generate.cpu.linear import GELU_TANH_NAMES, SILU_NAMES
from generate.gpu.experts import mixed
from generate.rotary import Turn, make_turn, rotation_tables, turn_heads
from models import network
from models.activations import ACTIVATIONS
from models.architecture import Architecture, Reach
from models.gguf.block_matrix import as_tensor

VOCABULARY_MULTIPLE = 64  # a product whose width is odd takes a slower kernel
Attend = Callable[[int, Tensor, float, Reach], Tensor]  # layer, qkv [n, (H + 2 KV) * D], scale: attention [n, H * D]


class Layer(NamedTuple):
    """A linear layer and its activation; weight (out, in).

    gated: the first half of the outputs goes through the activation and is multiplied by the second half.
    """

    weight: Tensor
    bias: Tensor | None
    activation: str = ""
    gated: bool = False


class Norm(NamedTuple):
    """A layer norm, its weight and bias in float32; or an RMS norm, without a bias, its weight as the model has it."""

    weight: Tensor
    bias: Tensor | None
    eps: float


class PlainMath:
    """PyTorch's own operations, one after the other."""

    name = "torch"

    def add_norm(self, residual: Tensor, x: Tensor | None, norm: Norm, dtype: torch.dtype) -> Tensor:
        """Add x to the float32 residual in place; return the sum's norm as `dtype`.

        An RMS norm multiplies by its weight in the weight's dtype.
        """
        if x is not None:
            residual.add_(x)
        if norm.bias is not None:
            return F.layer_norm(residual, residual.shape[1:], norm.weight, norm.bias, norm.eps).to(dtype)
        normed = residual * torch.rsqrt(residual.square().mean(-1, keepdim=True) + norm.eps)
        return (normed.to(norm.weight.dtype) * norm.weight).to(dtype)

    def linear(self, x: Tensor, layer: Layer) -> Tensor:
        """Return activation(x W + b) as x's dtype, with the gate if there is one."""
        return self._activate(F.linear(x, layer.weight, layer.bias), layer)

    def _activate(self, y: Tensor, layer: Layer) -> Tensor:
        if not layer.activation:
            return y
        activate = ACTIVATIONS[layer.activation]
        if not layer.gated:
            return activate(y)
        gate, up = y.chunk(2, -1)  # (n, inner) each
        return activate(gate) * up

    def turn(self, qkv: Tensor, rotation: Tensor, turn: Turn) -> Tensor:
        """Return qkv [n, (H + 2 KV) * D] with queries and keys rotated; rotation: float32 [n, 2, D/2]."""
        return turn_heads(qkv, rotation, turn)

    def prepare_head(self, weight: Tensor) -> Tensor:
        """Return the head's weight in the layout of `head`."""
        return weight.float()

    def head(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return float32 logits of x [n, C]; they may be wider than the vocabulary."""
        return x.float() @ weight.t()


class FusedMath(PlainMath):
    """Fewer kernels on a GPU: residual and norm, head norms and rotation, activation and gate; a padded head."""

    name = "fused"

    def __init__(self) -> None:
        from generate.gpu import triton_layers

        self.kernels = triton_layers

    def add_norm(self, residual: Tensor, x: Tensor | None, norm: Norm, dtype: torch.dtype) -> Tensor:
        return self.kernels.add_norm(residual, x, *norm, dtype)

    def linear(self, x: Tensor, layer: Layer) -> Tensor:
        if layer.activation in GELU_TANH_NAMES and layer.bias is not None and not layer.gated:
            y: Tensor = torch._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=True)
            return y
        return super().linear(x, layer)

    def _activate(self, y: Tensor, layer: Layer) -> Tensor:
        if layer.gated and layer.activation in SILU_NAMES:
            return self.kernels.silu_gate(y)
        return super()._activate(y, layer)

    def turn(self, qkv: Tensor, rotation: Tensor, turn: Turn) -> Tensor:
        """See `PlainMath.turn`; in place."""
        norms, queries, D = turn.norms, turn.H * turn.D, turn.D
        if norms is not None and norms.numel() > 2 * D:
            self.kernels.norm_in_place(qkv[:, :queries], norms[:queries], turn.eps)
            self.kernels.norm_in_place(qkv[:, queries : -turn.KV * D], norms[queries:], turn.eps)
            norms = None
        return self.kernels.turn(qkv, rotation, turn.H, turn.KV, norms, turn.eps)

    def prepare_head(self, weight: Tensor) -> Tensor:
        missing = -len(weight) % VOCABULARY_MULTIPLE
        return F.pad(weight, (0, 0, 0, missing)) if missing else weight.contiguous()

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
        fused = layer.activation in GELU_TANH_NAMES and not layer.gated
        y = self.kernels.linear(x, layer.weight, layer.bias, gelu=fused)
        return y if fused else self._activate(y, layer)

    def prepare_head(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    def head(self, x: Tensor, weight: Tensor) -> Tensor:
        logits: Tensor = self.kernels.linear(x, weight, None, out_dtype=torch.float32)
        return logits


class Block:
    """The parts of one transformer block, in the formats of the arithmetic."""

    def __init__(self, block: network.Block, config: Architecture, layer: int, math: PlainMath) -> None:
        self.norm_1, self.norm_2 = make_norm(block.norm_1, config), make_norm(block.norm_2, config)
        behind = (block.norm_1, block.norm_2) if config.norm_after else (block.attn_norm, block.mlp_norm)
        self.behind_1, self.behind_2 = (norm and make_norm(norm, config) for norm in behind)
        self.qkv, self.attn_proj = _layer(block.qkv), _layer(block.attn_proj)
        self.mlps = [(_layer(fc, config.activation, config.gated), _layer(proj)) for fc, proj in block.mlps()]
        self.router = block.router and math.prepare_head(as_tensor(block.router.weight))
        self.config = config
        self.scale, self.reach = config.attention_scale(layer), config.reach_of(layer)
        self.turn = make_turn(block, config, layer)

    def mlp(self, math: PlainMath, x: Tensor) -> Tensor:
        """Return what the MLP, or a mixture of them, makes of x [n, C]."""
        experts = [lambda x, mlp=mlp: math.linear(math.linear(x, mlp[0]), mlp[1]) for mlp in self.mlps]
        if self.router is None:
            return experts[0](x)
        return mixed(x, math.head(x, self.router)[:, : self.config.experts], self.config, experts)


def make_norm(norm: network.Norm, config: Architecture) -> Norm:
    """Return a norm in the formats of the arithmetic."""
    if config.norm == "rms":
        return Norm(norm.weight.contiguous(), None, config.norm_epsilon)
    bias = torch.zeros_like(norm.weight) if norm.bias is None else norm.bias
    return Norm(norm.weight.float().contiguous(), bias.float().contiguous(), config.norm_epsilon)


def _layer(part: network.Projection, activation: str = "", gated: bool = False) -> Layer:
    return Layer(as_tensor(part.weight).contiguous(), part.bias, activation, gated)


class Network:
    """The layers of a model in the order of a step."""

    def __init__(self, model: network.Network, math: PlainMath) -> None:
        config = model.config
        self.math = math
        self.vocabulary = config.vocab_size
        self.embedding, self.positions = model.embedding, model.positions
        self.dtype, self.norm_after, self.parallel = model.embedding.dtype, config.norm_after, config.parallel
        self.rotations = rotation_tables(config, model.embedding.device)  # [T, 2, D/2] each
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()
        self.cap = config.logits_cap
        self.blocks = [Block(block, config, layer, math) for layer, block in enumerate(model.blocks)]
        self.norm = make_norm(model.norm, config)
        self.embedding_norm = model.embedding_norm and make_norm(model.embedding_norm, config)
        self.head, self.head_bias = math.prepare_head(as_tensor(model.head)), model.head_bias

    def states(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the normed states [n, C] of tokens `ids` at `positions`."""
        math, dtype = self.math, self.dtype
        residual = F.embedding(ids, self.embedding)  # [n, C]
        residual = (residual if self.embedding_scale == 1 else residual * self.embedding_scale).float()
        if self.positions is not None:
            residual = residual + F.embedding(positions, self.positions)
        if self.embedding_norm is not None:
            residual = math.add_norm(residual, None, self.embedding_norm, dtype).float()
        rotations = {rope: table.index_select(0, positions) for rope, table in self.rotations.items()}  # [n, 2, D/2]
        x = None  # each add_norm adds the layer before it to the residual
        for i, block in enumerate(self.blocks):
            qkv = math.linear(self._taken(residual, x, block.norm_1), block.qkv)  # [n, (H + 2 KV) * D]
            beside = math.add_norm(residual, None, block.norm_2, dtype) if self.parallel else None
            if block.turn is not None:
                qkv = math.turn(qkv, rotations[block.turn.rope], block.turn)
            y = attend(i, qkv, block.scale, block.reach)  # [n, H * D]
            x = self._given(math.linear(y, block.attn_proj), block.behind_1)  # [n, C]
            if beside is None:
                beside = self._taken(residual, x, block.norm_2)
            else:
                residual.add_(x)
            x = self._given(block.mlp(math, beside), block.behind_2)  # [n, C]
        return math.add_norm(residual, x, self.norm, dtype)

    def _taken(self, residual: Tensor, x: Tensor | None, norm: Norm) -> Tensor:
        """Return what attention or the MLP takes, after x is added to the residual."""
        if not self.norm_after:
            return self.math.add_norm(residual, x, norm, self.dtype)
        return (residual if x is None else residual.add_(x)).to(self.dtype)

    def _given(self, x: Tensor, norm: Norm | None) -> Tensor:
        """Return what attention or the MLP adds to the residual."""
        return self.math.add_norm(x.float(), None, norm, self.dtype) if norm else x

    def logits(self, x: Tensor) -> Tensor:
        """Return float32 logits [n, V] of normed states x [n, C]."""
        if not len(x):
            return x.new_empty(0, self.vocabulary, dtype=torch.float32)
        logits = self.math.head(x, self.head)[:, : self.vocabulary]
        logits = logits if self.head_bias is None else logits + self.head_bias
        return self.cap * (logits / self.cap).tanh() if self.cap else logits
