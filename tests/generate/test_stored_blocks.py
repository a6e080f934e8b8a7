"""The blocks of a GGUF file go to the kernels as they are, whatever the family, and mean what the file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from generate.cpu import linear
from generate.machine import MachineError
from generate.quantize import check, kept_kinds, kinds_of
from generate.runner import ModelRunner
from models import weights
from models.gguf import gguf_file
from models.gguf.block_matrix import KINDS, BlockMatrix, as_tensor
from models.network import Network
from models.sources import catalog
from models.sources.checkpoint import CheckpointError
from tests.support.generate import logits_of
from tests.support.gguf import GPT2_KEYS, LLAMA_KEYS, converted, random_model

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5000.0},
    "qwen2": {"rope_theta": 5000.0},
    "qwen3": {"rope_theta": 5000.0, "head_dim": 8},
    "gpt2": {},
}
KEYS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2_KEYS,
    "qwen3": {"attention.key_length": 8, "attention.value_length": 8},
}  # fmt: skip
PARTS = ("qkv", "attn_proj", "fc", "mlp_proj")

needs_kernel = pytest.mark.skipif(not linear.kernel_runs("int4"), reason="needs a C compiler")


def stored(path: Path, family: str, kinds: dict[str, Kind], **changes: Any) -> catalog.ResolvedModel:
    inner = "n_inner" if family == "gpt2" else "intermediate_size"
    model = random_model(family, **{inner: 64}, **FAMILIES[family], **changes)
    keys = {**({} if family == "gpt2" else LLAMA_KEYS), **KEYS.get(family, {}), "feed_forward_length": 64}
    return catalog.resolve(str(converted(path / "model.gguf", model, keys, kinds=kinds)))


def matrices(model: Network) -> dict[str, Any]:
    named = {
        f"{layer} {part}": getattr(block, part).weight for layer, block in enumerate(model.blocks) for part in PARTS
    }
    return {**named, "head": model.head}


def test_parts_of_one_matrix_with_different_kinds_are_dequantized_and_the_others_are_not(tmp_path: Path) -> None:
    kinds = {"blk": Kind.Q4_1, "blk.1.attn_v": Kind.Q8_0, "ffn_down": Kind.Q5_0}
    resolved = stored(tmp_path, "llama", kinds, tie_word_embeddings=True)
    plain, mixed = weights.load(resolved, "bfloat16"), weights.load(resolved, "bfloat16", as_blocks=KINDS)
    in_blocks = [name for name, weight in matrices(mixed).items() if isinstance(weight, BlockMatrix)]
    assert in_blocks == ["0 qkv", "0 attn_proj", "0 fc", "1 attn_proj", "1 fc"]
    for name, weight in matrices(plain).items():
        assert torch.equal(as_tensor(matrices(mixed)[name]), weight), name
    assert mixed.head is mixed.embedding


@needs_kernel
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_blocks_computes_nearly_what_it_does_dequantized_alone_and_among_64(
    family: str, tmp_path: Path
) -> None:
    resolved = stored(tmp_path, family, {"blk": Kind.Q4_0, "token_embd": Kind.Q8_0})
    plain, blocks = (weights.load(resolved, "bfloat16", as_blocks=kinds) for kinds in ((), KINDS))
    runners = [ModelRunner(model, 80, 16) for model in (plain, blocks)]
    exact, found = (logits(runner, 64) for runner in runners)
    assert (found - exact).norm() < 0.1 * exact.norm()
    assert torch.equal(logits(runners[1], 1), found[:1])


def logits(runner: ModelRunner, count: int) -> torch.Tensor:
    """Return the logits after each of `count` prompts of five tokens, computed together."""
    prompts = [[(7 * i + j) % 61 for j in range(5)] for i in range(count)]
    return torch.stack([rows[-1] for rows in logits_of(runner, prompts)])


@pytest.mark.parametrize("half", [np.nan, np.inf])
def test_a_scale_that_is_no_number_is_refused_by_the_name_of_its_tensor(half: float, tmp_path: Path) -> None:
    resolved = stored(tmp_path, "llama", {"blk": Kind.Q4_1})
    assert resolved.path is not None
    place = gguf_file.read(resolved.path).tensors["blk.1.ffn_up.weight"]
    content = bytearray(resolved.path.read_bytes())
    content[place.start + 20 * 5 + 2 : place.start + 20 * 5 + 4] = np.float16(half).tobytes()  # a minimum
    resolved.path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight"):
        weights.load(resolved, "bfloat16", as_blocks=KINDS)


def test_blocks_are_kept_only_where_that_is_wanted_and_only_those_of_4_bits_beside_rounded_ones(tmp_path: Path) -> None:
    resolved = stored(tmp_path, "llama", {"blk": Kind.Q8_0, "ffn_down": Kind.Q4_1}, tie_word_embeddings=True)
    kinds = {}
    for quantize in ("none", "int8", "int4", "as-stored"):
        kinds[quantize] = kinds_of(weights.load(resolved, "bfloat16", as_blocks=kept_kinds(quantize, resolved)))
    assert kinds == {"none": [], "int8": [], "int4": ["Q4_1"], "as-stored": ["Q8_0", "Q4_1"]}


@needs_kernel
def test_as_stored_is_refused_by_name_where_there_are_no_blocks_to_keep(tmp_path: Path) -> None:
    for kinds in ({}, {"blk": Kind.Q5_0, "blk.1.attn_v": Kind.Q8_0}):
        resolved = stored(tmp_path, "llama", kinds, tie_word_embeddings=True)
        with pytest.raises(MachineError, match=r"--quantize as-stored .*Use none, int8, int4"):
            kept_kinds("as-stored", resolved)
    with pytest.raises(MachineError, match="--dtype bfloat16"):
        check("as-stored", torch.float32, torch.device("cpu"))
    with pytest.raises(MachineError, match="Use none on the cuda"):
        check("as-stored", torch.bfloat16, torch.device("cuda"))
