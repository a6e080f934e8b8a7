"""What the engine computes for a model: one description that the runners read, and nothing else of a family.

A family (GPT-2, Llama, Qwen) is one file in `models/families/` that turns a checkpoint's config.json into an
`Architecture` and names the checkpoint's tensors. `models/network.py` holds the tensors in the layout of the engine.
It must not import torch: the launcher describes a model before it loads one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the slow rotations, for contexts longer than the one it was first trained on."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class LongRope:
    """Divisors of the frequencies: `short` up to `original_context`, `long` beyond. `stretch` scales all sines and cosines."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    stretch: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding over whole heads: dimension i is rotated with dimension i + D/2.

    `factor` divides all frequencies (the type "linear"). Only `part` of the dimensions is rotated, rounded down: the first
    ones of each half, since `models/tensors.py` reorders heads. The others are not rotated.
    """

    theta: float = 10_000.0
    factor: float = 1.0
    llama3: Llama3Scaling | None = None
    longrope: LongRope | None = None
    part: float = 1.0


class Reach(NamedTuple):
    """What a token sees: the last `window` keys, including its own; 0 for all. `cap` bounds the scores; 0 for none.

    alibi: 0, or the power of two of heads whose slopes are ALiBi's (Press et al., 2022); the slopes of further heads lie
        between those.
    """

    window: int = 0
    cap: float = 0.0
    alibi: int = 0


FULL = Reach()


@dataclass(frozen=True, slots=True)
class Architecture:
    """One decoder-only transformer: its sizes, and the switches in which the families differ.

    inner_size: width of the MLP; a gated MLP computes activation(gate) * up, each of this width.
    rope: None for a learned table of positions. The layers in `unrotated` have no positions at all.
    window: the number of keys that a token sees in the layers `windowed`, including its own. These layers rotate by
        `local_rope`, if it is set.
    qk_norm: each head of queries and keys has an RMS norm before the rotation. With `whole_qk_norm` there are only two: one
        over all heads of queries and one over all heads of keys.
    experts: number of MLPs per layer, 0 for a plain MLP. A token goes to the `experts_chosen` that the router rates highest;
        with `experts_normalized` their shares add up to 1.
    parallel: attention and the MLP take the same residual, each after its own norm, or with `one_norm` after a common one.
    alibi: scores fall with the distance of a key, by a slope for each query head.
    embedding_norm: the embedding is normalized.
    norm_after: the outputs of attention and the MLP are normalized instead of their inputs; with `both_norms`, both are.
    attention_cap, logits_cap: scores and logits x become cap * tanh(x / cap), unless the cap is 0.
    scales: factors by part of `models.network`, by which its tensors are multiplied when they are loaded.
    """

    family: str
    block_size: int
    vocab_size: int
    n_layer: int
    n_embd: int
    n_head: int
    n_kv_head: int
    head_size: int
    inner_size: int
    norm: Literal["layer", "rms"]
    norm_epsilon: float
    rope: Rope | None
    activation: str
    gated: bool
    unrotated: frozenset[int] = frozenset()
    window: int = 0
    windowed: frozenset[int] = frozenset()
    local_rope: Rope | None = None
    qk_norm: bool = False
    whole_qk_norm: bool = False
    norm_after: bool = False
    both_norms: bool = False
    experts: int = 0
    experts_chosen: int = 0
    experts_normalized: bool = False
    parallel: bool = False
    one_norm: bool = False
    alibi: bool = False
    embedding_norm: bool = False
    qkv_bias: bool = False
    proj_bias: bool = False  # of the projection behind attention
    mlp_bias: bool = False
    head_bias: bool = False
    tied: bool = True  # the head is the table of tokens
    scales: tuple[tuple[str, float], ...] = ()
    embedding_scale: float = 1.0
    attention_cap: float = 0.0
    logits_cap: float = 0.0
    attention_multiplier: float | None = None  # in place of 1 / sqrt(head size)
    scale_attention: bool = True  # by 1 / sqrt(head size)
    scale_by_layer: bool = False  # by 1 / (layer + 1), too

    def attention_scale(self, layer: int) -> float:
        """Return the factor of the dot products of `layer` before the softmax."""
        scale = self.attention_multiplier or (1 / math.sqrt(self.head_size) if self.scale_attention else 1.0)
        return scale / (layer + 1) if self.scale_by_layer else scale

    def reach_of(self, layer: int) -> Reach:
        """Return what a token sees in `layer`."""
        window = self.window if layer in self.windowed and self.window < self.block_size else 0
        return Reach(window, self.attention_cap, 2 ** int(math.log2(self.n_head)) if self.alibi else 0)

    @property
    def reaches(self) -> set[Reach]:
        """The distinct reaches of all layers."""
        return {self.reach_of(layer) for layer in range(self.n_layer)}

    @property
    def memory(self) -> int:
        """How many keys the layers read at most, 0 for all: older ones can be given back."""
        return self.reach_of(0).window if len(self.windowed) == self.n_layer else 0

    def rope_of(self, layer: int) -> Rope | None:
        """Return the rotation of `layer`, None for one without."""
        own = self.local_rope if layer in self.windowed else None
        return None if layer in self.unrotated else own or self.rope

    @property
    def qkv_size(self) -> int:
        """The width of queries, keys and values side by side."""
        return (self.n_head + 2 * self.n_kv_head) * self.head_size
