"""The border between the engine and an architecture: what `generate/` knows of any model.

An architecture is one file in `models/` with a `LanguageModel`. `generate/cpu/blocks.py` and `generate/gpu/layers.py`
compute it on packed rows. The runners know nothing else of a model, so that a new architecture does not change them.
"""

from __future__ import annotations

from typing import Protocol

from torch import nn


class ModelShape(Protocol):
    """The sizes that runners, KV pages and benchmarks need."""

    @property
    def block_size(self) -> int: ...  # positions
    @property
    def vocab_size(self) -> int: ...
    @property
    def n_layer(self) -> int: ...
    @property
    def n_kv_head(self) -> int: ...  # heads of keys and values; query heads may be more
    @property
    def head_size(self) -> int: ...


class LanguageModel(nn.Module):
    """A module that computes logits from token ids; `lm_head.weight` (V, C) has its device and dtype."""

    config: ModelShape
    lm_head: nn.Linear
