"""GPT-2 as nanoGPT writes it, and the original project's model classes around it.

`GPT` reads top to bottom and computes whole sequences with plain PyTorch: it is what
`tools/train_bard.py` trains and what the tests trust. The serving engine (`generate/runner.py`)
takes its weights and computes the same function over packed rows and KV pages. Where weights come
from is the business of `weights.py`.

It must not know HTTP, batching or scheduling.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weights

log = logging.getLogger(__name__)

ACTIVATIONS = {
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),  # GPT-2's own; nanoGPT's erf form differs
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


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
            raise ValueError(
                f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}. "
                "Use a GPT-2 checkpoint"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation {self.activation!r} is not known. Use one of {', '.join(ACTIVATIONS)}"
            )

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    @property
    def inner_size(self) -> int:
        return self.n_inner or 4 * self.n_embd

    def attention_scale(self, layer: int) -> float:
        """What the dot products of `layer` are multiplied with before the softmax."""
        scale = 1 / math.sqrt(self.head_size) if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.scale = config.attention_scale(layer)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, H, T, D)
            for part in self.c_attn(x).split(C, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.inner_size)
        self.c_proj = nn.Linear(config.inner_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.activation(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def _table(rows: int, width: int) -> nn.Embedding:
    """Return a table of zeros: filling one as nn.Embedding does, without memory, loads PyTorch's compiler for a second."""
    return nn.Embedding.from_pretrained(torch.zeros(rows, width), freeze=False)


class GPT(nn.Module):
    """A GPT-2 language model with nanoGPT's names; `tie_word_embeddings` ties its head to `wte`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": _table(config.vocab_size, config.n_embd),
                "wpe": _table(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(Block(config, layer) for layer in range(config.n_layer)),
                "ln_f": nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon),
            }
        )
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

    def hidden(self, idx: Tensor, position: int = 0) -> Tensor:
        """Return the final hidden states (B, T, C) of token ids (B, T), the first at `position`."""
        T = idx.shape[1]
        if position + T > self.config.block_size:
            raise ValueError(
                f"{position + T} tokens exceed the context of {self.config.block_size}. "
                "Shorten the text"
            )
        places = torch.arange(position, position + T, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(places))
        for block in self.transformer.h:
            x = block(x)
        return self.transformer.ln_f(x)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, position: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits and loss of token ids (B, T).

        Without targets: logits (B, 1, V) of the last place, loss None. With targets (B, T), of
        which -1 is not counted: logits (B, T, V) and the mean cross entropy in nats a token.
        """
        x = self.hidden(idx, position)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        flat = logits.float().view(-1, logits.shape[-1])
        return logits, F.cross_entropy(flat, targets.reshape(-1), ignore_index=-1)


class ServerModel:
    """A GPT, its tokenizer and its device, under the original's names.

    `enc` is a tiktoken Encoding or a `generate.tokenizer.Tokenizer`: it has `encode_ordinary` and
    `decode`.
    """

    def __init__(self, model: GPT, enc: Any, device: str | torch.device) -> None:
        self.model = model.to(device).eval()
        self.enc = enc
        self.device = torch.device(device)

    def encode(self, s: str) -> list[int]:
        """Return the token ids of `s`, in which `<|endoftext|>` is ordinary text."""
        return self.enc.encode_ordinary(s)

    def decode(self, s: Sequence[int]) -> str:
        """Return the text of token ids."""
        return self.enc.decode(list(s))


class DynamicBatchingServerModel(ServerModel):
    """Compute sequences of different lengths in one pass, without padding and without a cache."""

    def batch_inference_forward(
        self, encoded_tensors: Sequence[Sequence[int] | Tensor], prompt_lengths: Sequence[int]
    ) -> Tensor:
        """Return the logits (n, 1, V) of the last place of n sequences of token ids.

        Selective batching (Yu et al., Orca, OSDI 2022): all tokens lie in one row that every linear
        layer takes at once, and only attention looks at each sequence by itself.
        """
        gpt, lengths = self.model, list(prompt_lengths)
        longest = max(lengths)
        if longest > gpt.config.block_size:
            raise ValueError(
                f"{longest} tokens exceed the context of {gpt.config.block_size}. Shorten the text"
            )
        rows = [torch.as_tensor(ids, device=self.device) for ids in encoded_tensors]
        places = [torch.arange(length, device=self.device) for length in lengths]
        x = gpt.transformer.wte(torch.cat(rows)) + gpt.transformer.wpe(torch.cat(places))  # (T, C)
        for block in gpt.transformer.h:
            x = x + self.modified_attention(block.attn, lengths, block.ln_1(x))
            x = x + block.mlp(block.ln_2(x))
        last = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        return gpt.lm_head(gpt.transformer.ln_f(x[last]))[:, None]

    def modified_attention(
        self, attn: CausalSelfAttention, prompt_lengths: Sequence[int], x: Tensor
    ) -> Tensor:
        """Return the attention (T, C) of the packed row x (T, C), each sequence within itself."""
        C = x.shape[1]
        outs = []
        for part in attn.c_attn(x).split(list(prompt_lengths)):  # (t, 3C) of one sequence
            q, k, v = part.view(-1, 3, attn.n_head, C // attn.n_head).permute(
                1, 2, 0, 3
            )  # (H, t, D)
            y = F.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, scale=attn.scale
            )
            outs.append(y[0].transpose(0, 1).reshape(-1, C))
        return attn.c_proj(torch.cat(outs))


def load_base_model_config(
    model: str | None = None,
    load_format: str = "auto",
    device: str = "auto",
    dtype: torch.dtype | str = "float32",
) -> tuple[GPT, Any, torch.device]:
    """Return (model, enc, device), which ServerModel takes; by default of gpt2-medium.

    If nothing was asked for and that is not to be had, it is bard, and a warning is logged.

    Ranks of GPT-2's tokenizer come from EB_TOKENIZER_FILE where it is set. Raises the errors of
    `weights.resolve`, `weights.load` and `generate.tokenizer.load_tokenizer`.
    """
    # The original hands out the tokenizer here, so here alone this room looks into the next.
    from generate.tokenizer import load_tokenizer

    resolved = weights.resolve(model, load_format)
    if resolved.warning:
        log.warning(resolved.warning)
    enc = load_tokenizer(resolved, os.environ.get("EB_TOKENIZER_FILE"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    return weights.load(resolved, dtype).to(place), enc, place
