"""The original project's model classes, and the GPT-2 that they wrap.

They serve programs that were written for the original; the engine (`generate/runner.py`) does not use them. It must
not know HTTP, batching or scheduling.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from models import weights
from models.gpt2 import GPT, CausalSelfAttention, GPTConfig
from models.sources import catalog
from models.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["GPT", "DynamicBatchingServerModel", "GPTConfig", "ServerModel", "load_base_model_config"]

log = logging.getLogger(__name__)


class Encoding(Protocol):
    """What a tiktoken Encoding and a `models.text.tokenizer.Tokenizer` have in common."""

    def encode_ordinary(self, text: str, /) -> list[int]: ...
    def decode(self, tokens: list[int], /) -> str: ...


class ServerModel:
    """A GPT, its tokenizer and its device, under the original's names."""

    def __init__(self, model: GPT, enc: Encoding, device: str | torch.device) -> None:
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
        """Return the logits (n, 1, V) of the last position of n sequences of token ids.

        Selective batching (Yu et al., Orca, OSDI 2022): all tokens lie in one row, which every linear layer computes
        at once; only attention looks at each sequence by itself.
        """
        gpt, lengths = self.model, list(prompt_lengths)
        longest = max(lengths)
        if longest > gpt.config.block_size:
            raise ValueError(f"{longest} tokens exceed the context of {gpt.config.block_size}. Shorten the text")
        rows = [torch.as_tensor(ids, device=self.device) for ids in encoded_tensors]
        positions = [torch.arange(length, device=self.device) for length in lengths]
        body = gpt.transformer
        x: Tensor = body.wte(torch.cat(rows)) + body.wpe(torch.cat(positions))  # (T, C), T the sum of all lengths
        for block in body.blocks:
            x = x + self.modified_attention(block.attn, lengths, block.ln_1(x))
            x = x + block.mlp(block.ln_2(x))
        last = torch.tensor(lengths, device=self.device).cumsum(0) - 1  # (n): the last row of each sequence
        logits: Tensor = gpt.lm_head(body.ln_f(x[last]))  # (n, V)
        return logits[:, None]

    def modified_attention(self, attn: CausalSelfAttention, prompt_lengths: Sequence[int], x: Tensor) -> Tensor:
        """Return the attention (T, C) of the packed row x (T, C), each sequence within itself."""
        C = x.shape[1]
        outs = []
        for part in attn.c_attn(x).split(list(prompt_lengths)):  # (t, 3C) of one sequence
            q, k, v = part.view(-1, 3, attn.n_head, C // attn.n_head).permute(1, 2, 0, 3)  # 3 of (H, t, D)
            y = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=attn.scale)
            outs.append(y[0].transpose(0, 1).reshape(-1, C))  # (1, H, t, D) -> (t, C)
        out: Tensor = attn.c_proj(torch.cat(outs))
        return out


def load_base_model_config(
    model: str | None = None, load_format: str = "auto", device: str = "auto", dtype: torch.dtype | str = "float32"
) -> tuple[GPT, Tokenizer, torch.device]:
    """Return (model, enc, device), the arguments of ServerModel; by default of gpt2-medium.

    If `model` is None and gpt2-medium cannot be loaded, load bard and log a warning. The ranks of GPT-2's tokenizer
    come from EB_TOKENIZER_FILE where it is set. Raises the errors of `catalog.resolve`, `weights.load_gpt` and
    `models.text.tokenizer.load_tokenizer`.
    """
    resolved = catalog.resolve(model, load_format)
    if resolved.warning:
        log.warning(resolved.warning)
    enc = load_tokenizer(resolved, os.environ.get("EB_TOKENIZER_FILE"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    target = torch.device(device)
    return weights.load_gpt(resolved, dtype).to(target), enc, target
