"""What the tests of kernels share: why one does not run here, and sums in one order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def why_no_kernel() -> str:
    """Return why packed_linear.c does not run here, for tests that are skipped then."""
    from generate.cpu import linear

    try:
        fits = linear._library().packed_linear_supported(linear.declarations().constants["BFLOAT16"])
    except (linear.KernelError, OSError) as error:
        return str(error)
    return (
        "packed_linear.c is off or wrong here"
        if fits
        else "needs a processor with AVX2 and FMA, AVX-512, or 64-bit ARM"
    )


def multiply_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter sum every row of a tile alike, as a GPU does: the BLAS it calls does not."""

    def matmul(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
        return np.einsum("mk,kn->mn", a, b, dtype=dtype)

    monkeypatch.setattr("triton.runtime.interpreter.np.matmul", matmul)
