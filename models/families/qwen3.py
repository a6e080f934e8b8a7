"""Qwen3, dense: Llama with an RMS norm over each head's queries and keys (Yang et al., 2025)."""

from models.architecture import Architecture
from models.families.llama import LAYOUT, sizes
from models.families.qwen2 import optional_windows
from models.family import GGUF, Config, Family

HEAD_DIM = 128  # Qwen3Config's default, whatever the width


def read(config: Config) -> Architecture:
    """Read a Qwen3Config."""
    config.assume(head_dim=HEAD_DIM)
    shape = sizes(config)
    return Architecture(family="qwen3", qk_norm=True, **shape, **optional_windows(config, shape))


FAMILY = Family(("qwen3",), read, LAYOUT, (GGUF("qwen3", "qwen3"),))
