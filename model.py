"""The original project's model classes, and the GPT-2 they wrap.

The serving engine does without them (`generate/runner.py`); they are here for programs that were written for the
original. It must not know HTTP, batching or scheduling.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from models import weights
from models.gpt2 import GPT, CausalSelfAttention, GPTConfig

__all__ = ["GPT", "DynamicBatchingServerModel", "GPTConfig", "ServerModel", "load_base_model_config"]

log = logging.getLogger(__name__)


class ServerModel:
    """A GPT, its tokenizer and its device, under the original's names.

    `enc` is a tiktoken Encoding or a `models.tokenizer.Tokenizer`: it has `encode_ordinary` and
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
            raise ValueError(f"{longest} tokens exceed the context of {gpt.config.block_size}. Shorten the text")
        rows = [torch.as_tensor(ids, device=self.device) for ids in encoded_tensors]
        places = [torch.arange(length, device=self.device) for length in lengths]
        x = gpt.transformer.wte(torch.cat(rows)) + gpt.transformer.wpe(torch.cat(places))  # (T, C)
        for block in gpt.transformer.h:
            x = x + self.modified_attention(block.attn, lengths, block.ln_1(x))
            x = x + block.mlp(block.ln_2(x))
        last = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        return gpt.lm_head(gpt.transformer.ln_f(x[last]))[:, None]

    def modified_attention(self, attn: CausalSelfAttention, prompt_lengths: Sequence[int], x: Tensor) -> Tensor:
        """Return the attention (T, C) of the packed row x (T, C), each sequence within itself."""
        C = x.shape[1]
        outs = []
        for part in attn.c_attn(x).split(list(prompt_lengths)):  # (t, 3C) of one sequence
            q, k, v = part.view(-1, 3, attn.n_head, C // attn.n_head).permute(1, 2, 0, 3)  # (H, t, D)
            y = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=attn.scale)
            outs.append(y[0].transpose(0, 1).reshape(-1, C))
        return attn.c_proj(torch.cat(outs))


def load_base_model_config(
    model: str | None = None, load_format: str = "auto", device: str = "auto", dtype: torch.dtype | str = "float32"
) -> tuple[GPT, Any, torch.device]:
    """Return (model, enc, device), which ServerModel takes; by default of gpt2-medium.

    If nothing was asked for and that is not to be had, it is bard, and a warning is logged.

    Ranks of GPT-2's tokenizer come from EB_TOKENIZER_FILE where it is set. Raises the errors of
    `weights.resolve`, `weights.load` and `models.tokenizer.load_tokenizer`.
    """
    # The original hands out the tokenizer here, so here alone this room looks into the next.
    from models.tokenizer import load_tokenizer

    resolved = weights.resolve(model, load_format)
    if resolved.warning:
        log.warning(resolved.warning)
    enc = load_tokenizer(resolved, os.environ.get("EB_TOKENIZER_FILE"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    return weights.load(resolved, dtype).to(place), enc, place
