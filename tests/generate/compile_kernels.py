"""Compile the GPU's Triton kernels for cards that need not be there; print the size of each program, as JSON.

In a process of its own: where kernels run in Triton's interpreter, none can be compiled.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from generate.gpu import triton_attention, triton_layers, triton_prompts, triton_sampling

CARDS = (80, 90)  # A100, H100 and H200
FORMATS = ("fp16", "bf16")


def kernels(dtype: str) -> dict[str, tuple[Any, dict[str, str], dict[str, Any]]]:
    """Return each kernel, the types of its arguments, and its constants for gpt2-medium, or for a Llama of 8 B."""
    x = f"*{dtype}"
    attend = dict.fromkeys(("QKV", "KEYS", "VALUES", "OUT"), x)
    attend |= {"BLOCK_TABLES": "*i64", "CONTEXT_LENS": "*i64", "PARTS": "*fp32", "ARRIVED": "*i32"}
    attend |= {"scale": "fp32", "MAX_PAGES": "i32"}
    pieces = {**dict.fromkeys(("QKV", "KEYS", "VALUES", "OUT"), x), "TILES": "*i64", "PAGES": "*i64", "scale": "fp32"}
    gpt2 = {"H": 16, "KV": 16, "P": 128, "D": 64, "BD": 64, "BM": 64}
    layer_norm = {"R": "*fp32", "X": x, "W": "*fp32", "B": "*fp32", "Y": x, "eps": "fp32", "stride": "i32"}
    product = {"X": x, "W": x, "B": x, "Y": x, "M": "i32", "N": "i32"}
    row = {"LOGITS": "*fp32", "BEST": "*fp32", "INVERSE": "*fp64", "SUMS": "*fp64", "stride": "i32"}
    vocabulary = {"V": 50257, "N": 197, "BLOCK": 256, "EXACT": True}
    llama = {"KV": 8, "G": 4, "P": 128, "D": 128, "BG": 16, "BD": 128, "BN": 32, "MP": 64, "BP": 64,
             "WINDOW": 0, "CAP": 0.0, "ALIBI": 0}  # fmt: skip
    return {
        "attend": (triton_attention._attend, attend,
                   {"H": 16, "P": 128, "D": 64, "BD": 64, "BN": 64, "MP": 8, "BP": 8, "WINDOW": 0, "CAP": 0.0, "ALIBI": 0}),
        "attend group": (triton_attention._attend_group, attend, llama),
        "attend alibi": (triton_attention._attend, attend,
                         {"H": 14, "P": 128, "D": 64, "BD": 64, "BN": 64, "MP": 8, "BP": 8, "WINDOW": 0, "CAP": 0.0, "ALIBI": 8}),
        "attend window": (triton_attention._attend_group, attend, {**llama, "WINDOW": 512, "CAP": 50.0, "ALIBI": 32}),
        "write pieces": (triton_prompts._write, pieces, gpt2),
        "attend pieces": (triton_prompts._attend, pieces, {**gpt2, "BN": 64, "WINDOW": 0, "CAP": 0.0, "ALIBI": 0}),
        "attend pieces of a Llama": (triton_prompts._attend, pieces,
                                     {"H": 32, "KV": 8, "P": 128, "D": 128, "BD": 128, "BM": 64, "BN": 64, "WINDOW": 512, "CAP": 50.0, "ALIBI": 32}),
        "norm": (triton_layers._add_norm, layer_norm, {"C": 1024, "BC": 1024, "ADD": True, "RMS": False}),
        "rms norm": (triton_layers._add_norm, {**layer_norm, "W": x, "B": x},
                     {"C": 4096, "BC": 4096, "ADD": True, "RMS": True}),
        "turn": (triton_layers._turn, {"QKV": x, "R": "*fp32", "W": x, "eps": "fp32"},
                 {"H": 32, "KV": 8, "D": 128, "BH": 4, "BD": 64, "NORM": True}),
        "gate": (triton_layers._silu_gate, {"Y": x, "OUT": x}, {"N": 14336, "BN": 1024}),
        "linear": (triton_layers._linear, product,
                   {"K": 1024, "BM": 64, "BN": 64, "BK": 64, "BIAS": True, "GELU": True}),
        "sum blocks": (triton_sampling._sum_blocks, row, {**vocabulary, "BN": 8}),
        "draw": (triton_sampling._draw, {**row, "KEYS": "*i64", "POSITIONS": "*i64", "TOKENS": "*i64"},
                 {**vocabulary, "BN": 256, "BAD": -1}),
    }  # fmt: skip


def main() -> None:
    warnings.simplefilter("ignore")  # of what a later Triton will do
    sizes = {}
    for card in CARDS:
        for dtype in FORMATS:
            for name, (kernel, types, constants) in kernels(dtype).items():
                types = {arg: types.get(arg, "constexpr") for arg in kernel.arg_names}
                source = ASTSource(kernel, types, constants)
                built = triton.compile(source, target=GPUTarget("cuda", card, 32))
                sizes[f"{name} {dtype} sm_{card}"] = len(built.asm["cubin"])
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
