"""Linear layers at the speed of the machine, in which a row's numbers do not depend on the number of rows.

There are three implementations, tried in this order. `KernelLinear` is our own bfloat16 kernel (packed_linear.c): it
reads weights at the speed of memory for few rows and computes near the peak for many, in the way that is fastest on this
processor (instructions.py; `EB_KERNELS` in the environment overrides).
`PackedLinear` is oneDNN with prepacked weights, for float32, and for bfloat16 on other processors. `Linear` is plain
PyTorch, for GPUs and where nothing else runs: in float32 on a CPU it calls MKL, where a row's numbers depend on how many
there are.

It must not know layers, pages or requests.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from generate import memory
from generate.cpu.declarations import declarations
from generate.cpu.instructions import WAYS, Measure, choose_way
from generate.cpu.kernels import KernelError, kept_beside
from generate.cpu.team import load
from models.activations import ACTIVATIONS
from models.gguf.block_matrix import KINDS, BlockMatrix, Weight, as_tensor

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("packed_linear.c")
GELU_TANH_NAMES = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
SILU_NAMES = ("silu", "swish")
WHOLE_VECTORS = 64  # values that every processor's loop of vectors takes at once, in every format
ONE_THREAD = 1 << 14  # values that torch gives to no second thread
GELU_MODES = {**dict.fromkeys(GELU_TANH_NAMES, "GELU_TANH"), "gelu": "GELU_ERF"}  # of packed_linear
FORMATS = {"none": "BFLOAT16", "int8": "INT8", "int4": "Q4_1"}  # of --quantize, in kernels.h
# Left to itself, the compiler fuses a product and a sum in one loop and not in another, and a row's bits would depend on
# the number of rows.
UNFUSED = ("-ffp-contract=off",)


class Extra(NamedTuple):
    """What is added to some rows of a product before its activation: float32 sums (k, out) to the k rows in `rows`.

    of_row: int32, for each row of the product that of `sums`, or -1.
    """

    sums: Tensor
    rows: Tensor
    of_row: Tensor


class LinearLayer(Protocol):
    """x (rows, in) to activation(x W + b + extra) (rows, out); `add` gives x W + b + extra + residual.

    The bits of rows that `extra` does not name are those without it.
    """

    def __call__(self, x: Tensor, extra: Extra | None = None) -> Tensor: ...
    def add(self, x: Tensor, residual: Tensor, extra: Extra | None = None) -> Tensor: ...


def _plus(y: Tensor, extra: Extra | None) -> Tensor:
    """Return y with its extra sums, added in place."""
    if extra is not None:
        y[extra.rows] = (y[extra.rows].float() + extra.sums).to(y.dtype)
    return y


def evenly(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return an activation whose bits do not depend on a value's place.

    torch rounds what its vectors leave over otherwise: after each thread's last 64 values, and of each call's.
    """

    def activate(x: Tensor) -> Tensor:
        width = x.shape[-1]
        if more := -width % WHOLE_VECTORS:
            return activate(F.pad(x, (0, more)))[..., :width].contiguous()
        if x.numel() <= ONE_THREAD:
            return activation(x)
        return torch.cat([activation(part) for part in torch.split(x.reshape(-1), ONE_THREAD)]).view_as(x)

    return activate


class Linear:
    """PyTorch's plain linear layer on any device. Weight (out, in)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.activate = ACTIVATIONS[activation] if activation else None

    def __call__(self, x: Tensor, extra: Extra | None = None) -> Tensor:
        y = _plus(F.linear(x, self.weight, self.bias), extra)
        return self.activate(y) if self.activate else y

    def add(self, x: Tensor, residual: Tensor, extra: Extra | None = None) -> Tensor:
        return _plus(F.linear(x, self.weight, self.bias).add_(residual), extra)


def round_rows(rows: int) -> int:
    """Return the padded number of rows: few different numbers, since oneDNN keeps code for each."""
    bands = ((2, 2), (4, 4), (64, 8), (256, 16), (512, 64))
    step = next((step for most, step in bands if rows <= most), 128)
    return -(-rows // step) * step


class PackedLinear:
    """oneDNN with the weight packed once, activation and residual fused.

    For every new number of rows, oneDNN generates code and keeps half a megabyte, up to a thousand times; so rows of
    zeros pad to a round number. A single row is padded too: oneDNN's float32 kernels for one row differ in the last
    bits from those for more.
    """

    FUSED = {**dict.fromkeys(GELU_TANH_NAMES, ("gelu", "tanh")), "gelu": ("gelu", "none"), "relu": ("relu", "")}

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)
        self.bias = bias
        self.activation = activation or ""
        self.fused = self.FUSED.get(self.activation, ("none", ""))
        self.activate = evenly(ACTIVATIONS[activation]) if activation and self.fused[0] == "none" else None

    def __call__(self, x: Tensor, extra: Extra | None = None) -> Tensor:
        name, form = self.fused
        y: Tensor = torch.ops.mkldnn._linear_pointwise(_pad(x), self.packed, self.bias, name, [], form)
        y = y[: len(x)]
        if name == "none" or extra is None:
            y = _plus(y, extra)
        else:  # the activation is fused, so these rows are computed again without it
            plain = torch.ops.mkldnn._linear_pointwise(_pad(x[extra.rows]), self.packed, self.bias, "none", [], "")
            sums = plain[: len(extra.rows)].float() + extra.sums
            y[extra.rows] = ACTIVATIONS[self.activation](sums).to(y.dtype)
        return self.activate(y) if self.activate else y

    def add(self, x: Tensor, residual: Tensor, extra: Extra | None = None) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(_pad(x), _pad(residual), self.packed, self.bias, "add")
        return _plus(y[: len(x)], extra)


def _pad(x: Tensor) -> Tensor:
    more = round_rows(len(x)) - len(x)
    return F.pad(x, (0, 0, 0, more)) if more else x


class KernelLinear:
    """packed_linear.c: bfloat16 in, float32 sums, bfloat16 out, or float32 out with `wide`.

    `gated`: the weight has the rows of a gate before those of an up projection, and the layer gives silu(gate) * up.
    `quantize`: what the weight is rounded to when it is packed, a key of FORMATS; it must be finite then. A weight in
    blocks stays as it is.
    """

    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None,
        activation: str | None = None,
        wide: bool = False,
        gated: bool = False,
        quantize: str = "none",
    ) -> None:
        self.library = _library()
        n, k = weight.shape
        name = FORMATS[quantize]
        if isinstance(weight, Tensor) and name in KINDS:
            weight = BlockMatrix.of(weight, name)
        if isinstance(weight, BlockMatrix):
            name, values = weight.kind, weight.data
        else:
            values = weight.contiguous()
        declared = declarations()
        modes, format = declared.constants, declared.constants[name]
        self.packed = memory.empty((self.library.packed_linear_bytes(format, n, k),), torch.uint8)
        self.library.packed_linear_pack(format, values.data_ptr(), self.packed.data_ptr(), n, k, gated)
        self.bias = bias.float().contiguous() if bias is not None else None
        self.struct = declared.structs["Linear"](
            self.packed.data_ptr(), self.bias.data_ptr() if self.bias is not None else None, n, k, format
        )
        fused = gated or activation in GELU_MODES
        self.plain = modes["PLAIN"]
        self.mode = modes["FLOAT32" if wide else "SWIGLU" if gated else GELU_MODES.get(activation or "", "PLAIN")]
        self.width = n // 2 if gated else n
        self.dtype = torch.float32 if wide else torch.bfloat16
        self.activate = evenly(ACTIVATIONS[activation]) if activation and not fused else None

    def __call__(self, x: Tensor, extra: Extra | None = None) -> Tensor:
        y = self._run(x, None, self.mode, extra)
        return self.activate(y) if self.activate else y

    def add(self, x: Tensor, residual: Tensor, extra: Extra | None = None) -> Tensor:
        return self._run(x, residual.data_ptr(), self.plain, extra)

    def _run(self, x: Tensor, residual: int | None, mode: int, extra: Extra | None) -> Tensor:
        m = len(x)
        out = torch.empty((m, self.width), dtype=self.dtype)
        more = None
        if extra is not None:
            more = ctypes.byref(declarations().structs["Extra"](extra.sums.data_ptr(), extra.of_row.data_ptr()))
        arguments = x.data_ptr(), residual, out.data_ptr(), m, mode, None, more
        self.library.packed_linear(ctypes.byref(self.struct), *arguments)
        return out


class Gated:
    """A gated MLP's first layer: activation(x Wg) * (x Wu), for a linear layer with the rows of Wg before those of Wu."""

    def __init__(self, linear: LinearLayer, activation: str) -> None:
        self.linear = linear
        self.activate = evenly(ACTIVATIONS[activation])

    def __call__(self, x: Tensor, extra: Extra | None = None) -> Tensor:
        gate, up = self.linear(x, extra).chunk(2, -1)  # (rows, inner) each
        return self.activate(gate) * up


def make_linear(
    weight: Weight, bias: Tensor | None, activation: str | None = None, quantize: str = "none"
) -> LinearLayer:
    """Return the fastest layer for this weight's device and dtype, or the one for weights that are rounded."""
    if _kernel_takes(weight, quantize):
        return KernelLinear(weight, bias, activation, quantize=quantize)
    weight = as_tensor(weight)
    if weight.device.type == "cpu" and packed_runs(weight.dtype):
        return PackedLinear(weight, bias, activation)
    return Linear(weight, bias, activation)


def make_gated(weight: Weight, bias: Tensor | None, activation: str, quantize: str = "none") -> KernelLinear | Gated:
    """Return the fastest first layer of a gated MLP, for a weight with the rows of Wg before those of Wu."""
    if _kernel_takes(weight, quantize) and activation in SILU_NAMES:
        return KernelLinear(weight, bias, gated=True, quantize=quantize)
    return Gated(make_linear(weight, bias, quantize=quantize), activation)


def make_head(weight: Weight, quantize: str = "none", bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return a layer with float32 outputs: GPT-2's logits share an offset at which 16 bits are coarse.

    Beside weights of 4 bits the head has 8, as in llama.cpp's files: each token's logit depends on it alone.
    """
    if quantize == "int4" and isinstance(weight, Tensor):
        weight = BlockMatrix.of(weight, "Q8_0")
    if _kernel_takes(weight, quantize):
        return KernelLinear(weight, bias, wide=True, quantize=quantize)
    linear = make_linear(as_tensor(weight).float(), None if bias is None else bias.float())
    return linear if weight.dtype == torch.float32 else lambda x: linear(x.float())


def _kernel_takes(weight: Weight, quantize: str) -> bool:
    """Return whether KernelLinear serves; a weight that is to be rounded has been checked, see generate/quantize.py."""
    if quantize != "none":
        return True
    if isinstance(weight, BlockMatrix):
        return kernel_runs("int4")  # which stands for all kinds of blocks
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return on_cpu and weight.shape[1] % 2 == 0 and kernel_runs()


@functools.cache
def kernel_runs(quantize: str = "none") -> bool:
    """Return whether packed_linear.c compiles, fits this processor, and computes what PyTorch does."""
    if os.environ.get("EB_KERNELS") == "off":
        return False
    try:
        if not _library().packed_linear_supported(declarations().constants[FORMATS[quantize]]):
            return False
        if quantize == "none" or _library().packed_linear_supported(declarations().constants["BFLOAT16"]):
            bfloat16_way()  # formats of bytes take tiles where bfloat16 does
        x, weight, bias = torch.randn(23, 128), torch.randn(80, 128), torch.randn(80)
        x, weight = x.bfloat16(), weight.bfloat16()
        found = KernelLinear(weight, bias, wide=True, quantize=quantize)(x)
        if (name := FORMATS[quantize]) in KINDS:
            weight = BlockMatrix.of(weight, name).dequantized()
        error = found - F.linear(x.float(), weight.float(), bias)
        if error.abs().max() < (1e-2 if quantize == "none" else 1.0):  # outputs have a deviation of 11
            return True
        log.warning("the C kernel for linear layers gives wrong results on this machine; using oneDNN instead")
    except (KernelError, OSError) as error:
        log.warning("the C kernel for linear layers does not run; using oneDNN instead: %s", error)
    return False


@functools.cache
def _library() -> ctypes.CDLL:
    return load(SOURCE, UNFUSED)


@functools.cache
def bfloat16_way() -> str:
    """Return the way in which this process multiplies bfloat16, one of `instructions.WAYS`, and set it in the kernel.

    Raises InstructionError for one in EB_KERNELS that this processor lacks, and KernelError.
    """
    library, ways = _library(), declarations().constants
    possible = [way for way in WAYS if library.packed_linear_has(ways[way.upper()])]
    if not possible:
        raise KernelError("this processor has no instructions that multiply and add float32 at once")
    way = choose_way(possible, os.environ.get("EB_KERNELS", ""), _product_timer(), kept_beside(SOURCE, UNFUSED))
    library.packed_linear_use(ways[way.upper()])
    return way


def _product_timer() -> Measure:
    """Return a function that takes the seconds of a product with a weight larger than a second-level cache."""

    @functools.cache
    def layer() -> KernelLinear:
        return KernelLinear(torch.ones(2048, 1024, dtype=torch.bfloat16), None)

    def seconds(way: str, rows: int) -> float:
        x = torch.ones(rows, 1024, dtype=torch.bfloat16)
        layer().library.packed_linear_use(declarations().constants[way.upper()])
        began = time.perf_counter()
        layer()(x)
        return time.perf_counter() - began

    return seconds


def linear_name(dtype: torch.dtype, device: torch.device, quantize: str = "none") -> str:
    """Return how linear layers of `dtype` compute on `device`: our kernel's way or format, "onednn" or "pytorch"."""
    if quantize != "none":
        return quantize
    if device.type == "cpu" and dtype == torch.bfloat16 and kernel_runs():
        return bfloat16_way()
    return "onednn" if device.type == "cpu" and packed_runs(dtype) else "pytorch"


@functools.cache
def packed_runs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has packed linear layers of `dtype` for this machine."""
    try:
        PackedLinear(torch.ones(64, 64, dtype=dtype), None)(torch.ones(1, 64, dtype=dtype))
    except (RuntimeError, AttributeError) as error:
        log.warning("oneDNN's packed linear layers do not run on this machine (%s); using plain ones", error)
        return False
    return True
