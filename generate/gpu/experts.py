"""A mixture of experts on a GPU: every expert computes every row, and those that a row did not choose get no weight.

So all shapes are known beforehand and a graph can hold it; but a step of any size reads all experts. It must not know
pages, requests or how an expert computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from generate.cpu.experts import route
from models.architecture import Architecture


def mixed(
    x: Tensor, logits: Tensor, config: Architecture, experts: Iterable[Callable[[Tensor], Tensor]]
) -> Tensor:  # fmt: skip
    """Return the sum of what the experts of each row make of x [n, C], by a router's float32 logits [n, experts]."""
    chosen, some = route(logits, config)
    shares = torch.zeros_like(logits).scatter_(1, chosen, some)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, share in zip(experts, shares.T[:, :, None]):
        total += torch.where(share > 0, expert(x).float() * share, 0)  # no NaN of an expert that was not chosen
    return total.to(x.dtype)
