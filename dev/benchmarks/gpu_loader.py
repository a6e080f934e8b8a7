"""What all parts of dev/benchmarks/gpu.py share: how much a run does, and the runners of its model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from generate import machine
from generate.gpu.runner import GpuRunner, make_runner
from generate.runner import ModelRunner
from models import weights
from models.sources import catalog

Keep = Callable[[Any], None]  # called with the results of a section so far


@dataclass(frozen=True)
class Sizes:
    """How much a run does."""

    model: str
    batch: list[int]
    context: list[int]
    prefill: list[int]
    prompts: int
    tokens: int
    burst: int
    steady: int  # requests that keep `slots` slots full
    slots: int
    seconds: float  # per figure


FULL = Sizes("gpt2-medium", [1, 8, 32, 64, 128, 256, 512], [128, 512, 1024], [128, 512, 1024],
             prompts=100, tokens=100, burst=256, steady=2048, slots=256, seconds=1.0)  # fmt: skip
SMALL = Sizes("bard", [1, 4], [64], [48], prompts=6, tokens=12, burst=8, steady=12, slots=4, seconds=0.2)


class Loader:
    """Make runners of one model, one at a time: each fills the card."""

    def __init__(self, model: str, load_format: str, device: str, dtype: str) -> None:
        self.resolved = catalog.resolve(model, load_format)
        self.shape = self.resolved.architecture
        self.device = machine.choose_device(device)
        self.dtype = machine.choose_dtype(dtype, self.device, self.resolved.trained_dtype)
        self.page_size = machine.page_size(self.device)

    def reference(self, tokens: int) -> ModelRunner:
        """Return the CPU's runner in float32, with pages for `tokens` tokens."""
        size = machine.PAGE_SIZE
        return ModelRunner(weights.load(self.resolved, torch.float32), tokens // size + 2, size)

    def runner(self, tokens: int, capacity: int, strict: bool = False) -> GpuRunner:
        """Return a warm runner with pages for `tokens` tokens, or for as many as the free memory holds."""
        clear()
        model = weights.load(self.resolved, self.dtype).to(self.device)
        most = machine.kv_pages(model.config, self.dtype, self.device, 0, capacity)
        pages = min(tokens // self.page_size + 2, most)
        return make_runner(model, pages, self.page_size, capacity, strict, any_format=False)


def clear() -> None:
    """Free the card's unused memory. A runner is part of reference cycles, which only a collection ends."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
