"""A mixture of experts in place of a block's MLP: each row goes to the few experts that a router rates highest.

The rows of a step are grouped by expert, so that one read of an expert's weights serves all its rows, and an expert that
no row chose is not read at all. A row's sum goes through its experts in ascending order, so its bits do not depend on
other rows. It must not know layers, pages or requests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from generate.cpu.linear import Extra, Gated, LinearLayer, make_gated, make_linear
from models.architecture import Architecture
from models.gguf.block_matrix import as_tensor
from models.network import Block


def route(logits: Tensor, config: Architecture) -> tuple[Tensor, Tensor]:
    """Return the experts of each row and their float32 shares (rows, chosen), from a router's logits (rows, experts)."""
    shares, experts = logits.softmax(-1).topk(config.experts_chosen)
    return experts, shares / shares.sum(-1, keepdim=True) if config.experts_normalized else shares


class Experts:
    """The experts of one layer, each with its weights in the fastest layout; a linear layer (C to C) to its block.

    read: how many experts the latest step read.
    """

    def __init__(self, block: Block, config: Architecture, quantize: str = "none") -> None:
        assert block.router is not None
        self.config, self.read = config, 0
        self.router = make_linear(as_tensor(block.router.weight).float(), None)
        first: Callable[..., LinearLayer | Gated] = make_gated if config.gated else make_linear
        self.experts = [
            (first(*fc, config.activation, quantize), make_linear(*proj, quantize=quantize))
            for fc, proj in block.mlps()
        ]

    def __call__(self, x: Tensor, extra: Extra | None = None) -> Tensor:
        return self._sum(x, torch.zeros(x.shape, dtype=torch.float32, device=x.device)).to(x.dtype)

    def add(self, x: Tensor, residual: Tensor, extra: Extra | None = None) -> Tensor:
        return self._sum(x, residual.float()).to(residual.dtype)

    def _sum(self, x: Tensor, total: Tensor) -> Tensor:
        """Add to each row of total (rows, C), which is float32, what its experts make of x (rows, C)."""
        chosen, shares = route(self.router(x.float()), self.config)
        used = torch.unique(chosen).tolist()
        self.read = len(used)
        for expert in used:
            rows, place = torch.where(chosen == expert)
            first, second = self.experts[expert]
            total[rows] += second(first(x[rows])).float() * shares[rows, place, None]
        return total
