"""Compile what a model on a CPU will need while its weights are read: at the first start that takes seconds a file.

It must not know how a file is compiled or what is in it.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from generate.cpu import kernels, linear


def prepare(dtype: torch.dtype, quantize: str) -> None:
    """Begin to load the C files that a model of `dtype` needs. Whoever then loads a file gets its error."""
    if os.environ.get("EB_KERNELS") == "off":
        return
    for source in sorted(Path(__file__).parent.glob("*.c")):
        if source != linear.SOURCE:
            kernels.begin(source)
        elif dtype == torch.bfloat16 or quantize != "none":  # else oneDNN or PyTorch serve
            kernels.begin(source, linear.UNFUSED)
