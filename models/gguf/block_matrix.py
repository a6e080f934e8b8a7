"""A weight in the blocks of a GGUF file: 4 or 8 bits for each number, with a scale, and perhaps a minimum, for each 32.

It must not know files, layers or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor

KINDS = ("Q4_0", "Q4_1", "Q8_0")
BLOCK = 32  # numbers
BAND = 2**22  # numbers that are converted at once


@dataclass(frozen=True, eq=False)
class BlockMatrix:
    """A weight (out, in) whose inputs are in blocks of `kind`; those behind `columns` are zeros.

    data: uint8 (out, bytes). dtype: what it is dequantized to, that of the model it belongs to.
    """

    kind: str
    data: Tensor
    columns: int
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: Tensor, kind: str) -> BlockMatrix:
        """Round a finite weight (out, in) to blocks."""
        (n, k), (numbers, size) = weight.shape, GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        band = max(1, BAND // k)
        data = torch.empty((n, -(-k // numbers) * size), dtype=torch.uint8)
        for first in range(0, n, band):
            values = torch.nn.functional.pad(weight[first : first + band].float(), (0, -k % BLOCK)).numpy()
            data[first : first + band] = torch.from_numpy(quantize(values, GGMLQuantizationType[kind]))
        return cls(kind, data, k, weight.dtype)

    @classmethod
    def stored(cls, kind: str, data: Tensor) -> BlockMatrix:
        """Return a weight from rows of blocks, as files have them."""
        numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        return cls(kind, data, data.shape[1] // size * numbers, torch.float32)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.data), self.columns))

    @property
    def device(self) -> torch.device:
        return self.data.device

    def numel(self) -> int:
        """Return how many numbers it holds."""
        return self.shape.numel()

    def chunk(self, n: int) -> list[BlockMatrix]:
        """Return its rows in `n` parts."""
        return [replace(self, data=data) for data in self.data.chunk(n)]

    def dequantized(self) -> Tensor:
        """Return the weight in `dtype`."""
        n, k = self.shape
        values = torch.empty((n, k), dtype=self.dtype)
        band = max(1, BAND // k)
        for first in range(0, n, band):
            part = dequantize(self.data[first : first + band].numpy(), GGMLQuantizationType[self.kind])
            values[first : first + band] = torch.from_numpy(np.ascontiguousarray(part))[:, :k]
        return values

    def to(self, target: torch.device | torch.dtype) -> BlockMatrix | Tensor:
        """Return itself on the CPU and in its dtype; elsewhere it is dequantized."""
        return self if target in (self.dtype, self.device) else self.dequantized().to(target)


Weight = Tensor | BlockMatrix


def as_tensor(weight: Weight) -> Tensor:
    """Return the weight itself, or dequantized if it is in blocks."""
    return weight.dequantized() if isinstance(weight, BlockMatrix) else weight
