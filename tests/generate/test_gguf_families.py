"""A GGUF file of each family gives the model that it was converted from, and its blocks go to the kernels as they are."""

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
from models.gguf.block_matrix import KINDS, BlockMatrix, as_tensor
from models.network import Network
from models.sources import catalog
from tests.support.families import PAGE_SIZE, PAGES, PROMPTS, random_hf
from tests.support.generate import logits_of
from tests.support.gguf import converted

RMS, LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
SIZES = {"block_count": 3, "context_length": 320, "embedding_length": 48, "feed_forward_length": 80,
         "attention.head_count": 6}  # fmt: skip
OWN_HEADS = {"attention.key_length": 16, "attention.value_length": 16}
GROUPED = {"num_key_value_heads": 2}
LONG = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 9.0],
        "partial_rotary_factor": 0.75, "original_max_position_embeddings": 64, "attention_factor": 1.25}  # fmt: skip
LINEAR = {"full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
          "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}  # fmt: skip
# model_type, changes of its config, keys of the file.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_inner": 80, "n_positions": 320}, {LAYER: 1e-5}),
    "llama": ("llama", {**GROUPED, "attention_bias": True, "mlp_bias": True}, {"attention.head_count_kv": 2, RMS: 1e-6}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}, {RMS: 1e-6, "rope.freq_base": 10000.0}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0}},
                      {RMS: 1e-6, "rope.freq_base": 300.0, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "mistral": ("mistral", {**GROUPED, "sliding_window": 16},
                {"attention.head_count_kv": 2, RMS: 1e-6, "attention.sliding_window": 16}),
    "mixtral": ("mixtral", {**GROUPED, "num_local_experts": 4},
                {"attention.head_count_kv": 2, RMS: 1e-5, "rope.freq_base": 1e6, "expert_count": 4, "expert_used_count": 2}),
    "qwen2": ("qwen2", GROUPED, {"attention.head_count_kv": 2, RMS: 1e-6}),
    "qwen3": ("qwen3", {**GROUPED, "head_dim": 16}, {"attention.head_count_kv": 2, RMS: 1e-6, **OWN_HEADS}),
    "qwen3_moe": ("qwen3_moe", {**GROUPED, "head_dim": 16, "num_experts": 5, "num_experts_per_tok": 3,
                                "moe_intermediate_size": 32, "norm_topk_prob": True},
                  {"attention.head_count_kv": 2, RMS: 1e-6, **OWN_HEADS, "expert_count": 5, "expert_used_count": 3,
                   "expert_feed_forward_length": 32}),
    "smollm3": ("smollm3", {**GROUPED, "num_hidden_layers": 4},
                {"block_count": 4, "attention.head_count_kv": 2, RMS: 1e-6, "rope.freq_base": 2e6}),
    "granite": ("granite", {**GROUPED, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
                            "attention_multiplier": 0.2, "logits_scaling": 0.5},
                {"attention.head_count_kv": 2, RMS: 1e-6, "attention.scale": 0.2, "embedding_scale": 12.0,
                 "residual_scale": 0.22, "logit_scale": 0.5}),
    "olmo2": ("olmo2", GROUPED, {"attention.head_count_kv": 2, RMS: 1e-5}),
    "gemma2": ("gemma2", {**GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16,
                          "attn_logit_softcapping": 1.5, "attn_implementation": "eager"},
               {"attention.head_count_kv": 2, RMS: 1e-6, **OWN_HEADS, "attention.sliding_window": 16,
                "attn_logit_softcapping": 1.5, "final_logit_softcapping": 30.0}),
    "gemma3": ("gemma3_text", {**GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16,
                               "num_hidden_layers": 7, "rope_parameters": LINEAR},
               {"block_count": 7, "attention.head_count_kv": 2, RMS: 1e-6, **OWN_HEADS, "attention.sliding_window": 16,
                "rope.freq_base": 5e5, "rope.freq_base_swa": 50.0, "rope.scaling.type": "linear",
                "rope.scaling.factor": 4.0}),
    "phi": ("phi", {"partial_rotary_factor": 0.5}, {LAYER: 1e-5, "rope.dimension_count": 4}),
    "phi3": ("phi3", {**GROUPED, "sliding_window": 16},
             {"attention.head_count_kv": 2, RMS: 1e-5, "attention.sliding_window": 16,
              "rope.scaling.original_context_length": 4096, "rope.dimension_count": 8}),
    "phi3, longrope": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64},
                       {RMS: 1e-5, "attention.sliding_window": 0, "rope.scaling.original_context_length": 64,
                        "rope.scaling.attn_factor": 1.25, "rope.freq_base": 500.0, "rope.dimension_count": 6}),
    "gpt_neox": ("gpt_neox", {"use_parallel_residual": False},
                 {LAYER: 1e-5, "rope.dimension_count": 2, "use_parallel_residual": False}),
    "falcon, 7B": ("falcon", {}, {LAYER: 1e-5, "attention.head_count_kv": 1, "feed_forward_length": 192}),
    "falcon, 40B": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False},
                    {LAYER: 1e-5, "attention.head_count_kv": 2, "feed_forward_length": 192}),
    "bloom": ("bloom", {"seq_length": 320},
              {LAYER: 1e-5, "block_count": 2, "attention.head_count": 8, "attention.head_count_kv": 8,
               "feed_forward_length": 192}),
}  # fmt: skip


def build(case: str, folder: Path, kinds: Any = None, other_keys: Any = None, **more: Any) -> tuple[Any, Path]:
    """Return transformers' model, and a file with its tensors."""
    model_type, changes, keys = FAMILIES[case]
    hf = random_hf(model_type, {**changes, **more}, len(case))
    factors = {
        f"rope_factors_{name}.weight": (np.array(LONG[f"{name}_factor"], np.float32), Kind.F32)
        for name in ("long", "short")
    }
    extra = factors if "longrope" in case else {}
    return hf, converted(folder / "model.gguf", hf, {**SIZES, **keys, **(other_keys or {})}, extra, kinds)


@pytest.mark.parametrize("case", FAMILIES)
def test_a_converted_model_computes_what_transformers_does(case: str, tmp_path: Path) -> None:
    hf, path = build(case, tmp_path)
    network = weights.load(catalog.resolve(str(path)))
    with torch.inference_mode():
        expected = hf(torch.tensor([PROMPTS[-1]])).logits[0].log_softmax(-1)
    found = logits_of(ModelRunner(network, PAGES, PAGE_SIZE), [PROMPTS[-1]])[0].log_softmax(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


WIDE: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 64}  # whole blocks


def stored(case: str, folder: Path, kinds: dict[str, Kind], **changes: Any) -> catalog.ResolvedModel:
    """Return a model whose matrices have whole blocks, of these kinds by the parts of their names."""
    sizes, keys = WIDE | changes, {"embedding_length": 96, "feed_forward_length": 64}
    if case == "gpt2":
        sizes |= {"n_inner": sizes.pop("intermediate_size")}
    if "moe" in case:
        sizes, keys = sizes | {"moe_intermediate_size": 64}, keys | {"expert_feed_forward_length": 64}
    return catalog.resolve(str(build(case, folder, kinds, keys, **sizes)[1]))


def matrices(network: Network) -> dict[str, Any]:
    parts = {
        f"{layer} {name}": part.weight
        for layer, block in enumerate(network.blocks)
        for name, part in [("qkv", block.qkv), ("attn_proj", block.attn_proj)]
        + [(f"{name} {i}", part) for i, mlp in enumerate(block.mlps()) for name, part in zip(("fc", "mlp_proj"), mlp)]
    }
    return {**parts, "head": network.head}


@pytest.mark.skipif(not linear.kernel_runs("int4"), reason="needs a C compiler")
@pytest.mark.parametrize(
    ("case", "kind"),
    [("gpt_neox", "Q8_0"), ("phi", "Q4_1"), ("qwen3_moe", "Q8_0"), ("gemma3", "Q8_0"), ("gpt2", "Q4_0"), ("llama", "Q4_1"),
     ("qwen2", "Q8_0"), ("qwen3", "Q4_0")],
)  # fmt: skip
def test_blocks_stay_as_they_are_and_compute_nearly_what_they_do_dequantized_alone_and_among_64(
    case: str, kind: str, tmp_path: Path
) -> None:
    parts = ("attn", "ffn_up", "ffn_gate", "ffn_down", "output")
    kinds = dict.fromkeys(parts, Kind[kind]) | {"inp": Kind.F32, "token_embd": Kind.Q8_0}
    resolved = stored(case, tmp_path, kinds)
    plain, blocks = (weights.load(resolved, "bfloat16", as_blocks=kinds) for kinds in ((), KINDS))
    for before, after in zip(matrices(plain).values(), matrices(blocks).values(), strict=True):
        assert isinstance(after, BlockMatrix)
        assert torch.equal(as_tensor(after), as_tensor(before))
    assert torch.equal(blocks.embedding, plain.embedding)
    assert (blocks.config, blocks.parameters) == (plain.config, plain.parameters)
    prompts = [[(7 * i + j) % 211 for j in range(5)] for i in range(64)]
    exact, found = (torch.cat(logits_of(ModelRunner(network, 80, 16), prompts)) for network in (plain, blocks))
    assert (found - exact).norm() < 0.1 * exact.norm()
    again = weights.load(resolved, "bfloat16", as_blocks=KINDS)
    assert torch.equal(logits_of(ModelRunner(again, 80, 16), prompts[:1])[0], found[:5])


def test_parts_of_one_matrix_with_different_kinds_are_dequantized_and_the_others_are_not(tmp_path: Path) -> None:
    kinds = {"blk": Kind.Q4_1, "blk.1.attn_v": Kind.Q8_0, "ffn_down": Kind.Q5_0}
    resolved = stored("llama", tmp_path, kinds, tie_word_embeddings=True)
    plain, mixed = weights.load(resolved, "bfloat16"), weights.load(resolved, "bfloat16", as_blocks=KINDS)
    in_blocks = [name for name, weight in matrices(mixed).items() if isinstance(weight, BlockMatrix)]
    assert in_blocks == ["0 qkv", "0 attn_proj", "0 fc 0", "1 attn_proj", "1 fc 0", "2 qkv", "2 attn_proj", "2 fc 0"]
    for name, weight in matrices(plain).items():
        assert torch.equal(as_tensor(matrices(mixed)[name]), weight), name
    assert mixed.head is mixed.embedding


def test_blocks_are_kept_only_where_that_is_wanted_and_only_those_of_4_bits_beside_rounded_ones(tmp_path: Path) -> None:
    resolved = stored("llama", tmp_path, {"blk": Kind.Q8_0, "ffn_down": Kind.Q4_1}, tie_word_embeddings=True)
    kinds = {}
    for quantize in ("none", "int8", "int4", "as-stored"):
        kinds[quantize] = kinds_of(weights.load(resolved, "bfloat16", as_blocks=kept_kinds(quantize, resolved)))
    assert kinds == {"none": [], "int8": [], "int4": ["Q4_1"], "as-stored": ["Q8_0", "Q4_1"]}


def test_as_stored_is_refused_by_name_where_there_are_no_blocks_to_keep(tmp_path: Path) -> None:
    for kinds in ({}, {"blk": Kind.Q5_0, "blk.1.attn_v": Kind.Q8_0}):
        resolved = stored("llama", tmp_path, kinds, tie_word_embeddings=True)
        with pytest.raises(MachineError, match=r"--quantize as-stored .*Use none, int8, int4"):
            kept_kinds("as-stored", resolved)
    with pytest.raises(MachineError, match="--dtype bfloat16"):
        check("as-stored", torch.float32, torch.device("cpu"))
    with pytest.raises(MachineError, match="Use none on the cuda"):
        check("as-stored", torch.bfloat16, torch.device("cuda"))
