"""A GGUF file gives the same config and the same tensors as the folder it was converted from."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from generate.runner import ModelRunner
from models import weights
from models.gguf import gguf_file
from models.gguf.gguf_reader import KINDS
from models.sources import catalog
from models.sources.checkpoint import CheckpointError
from tests.support.checkpoints import transformers
from tests.support.generate import logits_of
from tests.support.gguf import LLAMA_KEYS, converted, random_model, tiny, write


def test_transformers_reads_the_same_from_a_llama_with_grouped_heads(tmp_path: Path) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # what from_pretrained reads with

    model = random_model("llama", rope_theta=5000.0)
    path = converted(tmp_path / "model.gguf", model, {**LLAMA_KEYS, "vocab_size": 61})
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    resolved = catalog.resolve(str(path))
    model.load_state_dict(theirs["tensors"])
    runner = ModelRunner(weights.load(resolved, "float32"), 9, 16)
    with torch.inference_mode():
        expected = model(torch.tensor([[*range(3, 43)]])).logits[0]
    torch.testing.assert_close(logits_of(runner, [[*range(3, 43)]])[0], expected, rtol=1e-4, atol=1e-4)
    config = resolved.config
    common = set(config) & set(theirs["config"])
    assert len(common) >= 10
    assert {key: config[key] for key in common} == pytest.approx({key: theirs["config"][key] for key in common})


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_read_as_the_gguf_package_dequantizes_it(kind: str, tmp_path: Path) -> None:
    shape, rng = (256, 512), np.random.default_rng(5)
    try:
        blocks = gguf.quants.quantize(rng.normal(size=shape).astype(np.float32), Kind[kind])
    except NotImplementedError:  # the K-quants, of which any bytes are a valid block
        blocks = rng.integers(0, 256, gguf.quant_shape_to_byte_shape(shape, Kind[kind]), np.uint8)
    path = write(tmp_path / "model.gguf", "llama", {}, {"x": (blocks, Kind[kind])})
    file = gguf_file.read(path)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, Kind[kind])
    assert (file.tensors["x"].shape, file.tensors["x"].kind) == (shape, kind)
    assert np.array_equal(file.tensor("x"), expected, equal_nan=True)


def test_low_nibbles_are_the_first_half_of_a_block(tmp_path: Path) -> None:
    block = struct.pack("<ee16B", 0.5, -2.0, *(i | (15 - i) << 4 for i in range(16)))
    blocks = np.frombuffer(block, np.uint8)[None]
    path = write(tmp_path / "model.gguf", "llama", {}, {"x": (blocks, Kind.Q4_1)})
    expected = [[0.5 * q - 2 for q in (*range(16), *reversed(range(16)))]]
    assert gguf_file.read(path).tensor("x").tolist() == expected


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_blocks_with_a_scale_that_is_no_number_are_refused(value: float, kind: str, tmp_path: Path) -> None:
    blocks = gguf.quants.quantize(np.ones((64, 96), np.float32), Kind[kind])
    blocks[5, -blocks.shape[1] // 3 :].view(np.float16)[0] = value  # the first half of a row's last block
    path = write(tmp_path / "model.gguf", "llama", {}, {"x": (blocks, Kind[kind])})
    with pytest.raises(CheckpointError, match="'x' has a scale"):
        gguf_file.read(path).blocks("x")


def test_metadata_are_plain_values(tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.tokens": ["a", "Ġé", ""], "tokenizer.ggml.scores": [0.5, -1.0], "general.x": True}
    metadata = gguf_file.read(tiny(tmp_path / "model.gguf", changes)).metadata
    assert {key: metadata[key] for key in changes} == changes
    assert metadata["llama.block_count"] == 2


def llama3_factors(head_dim: int, theta: float, scaling: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return what transformers' own scaling divides each frequency by."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    shape = {"hidden_size": head_dim, "num_attention_heads": 1, "head_dim": head_dim}
    config = transformers().LlamaConfig(**shape, rope_theta=theta, rope_scaling=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return (plain / scaled).numpy()


@pytest.mark.parametrize(("factor", "head_dim"), [(8.0, 128), (32.0, 64)])
def test_the_scaling_of_llama3_is_found_in_its_factors(factor: float, head_dim: int, tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    factors = llama3_factors(head_dim, 500000.0, dict(scaling))
    keys = {"rope.freq_base": 500000.0, "attention.key_length": head_dim, "attention.value_length": head_dim}
    file = gguf_file.read(tiny(tmp_path / "ok.gguf", keys, {"rope_freqs.weight": (factors, Kind.F32)}))
    assert gguf_file.config(file)["rope_scaling"] == scaling

    other = gguf_file.read(tiny(tmp_path / "x.gguf", keys, {"rope_freqs.weight": (factors**2, Kind.F32)}))
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        gguf_file.config(other)


def test_every_token_that_ends_a_turn_is_an_end(tmp_path: Path) -> None:
    ends = {f"tokenizer.ggml.{name}_token_id": n for name, n in (("eos", 9), ("eot", 7), ("eom", 9), ("bos", 3))}
    config = gguf_file.config(gguf_file.read(tiny(tmp_path / "model.gguf", ends)))
    assert (config["eos_token_id"], config["bos_token_id"]) == ([9, 7], 3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_used_count", 8),
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.factor", 4.0),
        ("rope.dimension_count", 4),
        ("attention.value_length", 16),
        ("final_logit_softcapping", 30.0),
        ("a.switch.of.tomorrow", True),
        ("split.count", 3),
        ("general.type", "adapter"),
        ("block_count", 2_000_000_000),
        ("block_count", 0),
        ("embedding_length", "32"),
        ("attention.head_count", [4, 4]),
        ("attention.layer_norm_rms_epsilon", float("nan")),
        ("rope.freq_base", 0.0),
        ("vocab_size", 62),
        ("tokenizer.ggml.eos_token_id", "two"),
    ],
)
def test_a_switch_that_is_not_understood_or_cannot_be_is_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=key):
        gguf_file.config(gguf_file.read(tiny(tmp_path / "model.gguf", {key: value})))


def test_a_switch_that_changes_nothing_is_accepted(tmp_path: Path) -> None:
    neutral = {"expert_count": 0, "rope.scaling.type": "none", "rope.dimension_count": 8, "attention.causal": True}
    assert gguf_file.config(gguf_file.read(tiny(tmp_path / "model.gguf", neutral)))["head_dim"] == 8


def test_a_number_is_what_the_config_of_the_folder_says(tmp_path: Path) -> None:
    config = gguf_file.config(gguf_file.read(tiny(tmp_path / "model.gguf")))
    assert config["rms_norm_eps"] == 1e-5  # the file's float32 is 9.99999974e-06


def test_an_architecture_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    file = gguf_file.read(write(tmp_path / "model.gguf", "mamba", {"ssm.state_size": 16}, {}))
    for refused in (gguf_file.config, gguf_file.layout):
        with pytest.raises(CheckpointError, match=r"mamba.*ssm\.state_size sets state space layers"):
            refused(file)


def test_a_kind_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model.gguf", {}, {"x": (np.zeros((2, 18), np.uint8), Kind.IQ4_NL)})
    with pytest.raises(CheckpointError, match="IQ4_NL"):
        gguf_file.read(path)


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_shexp.weight", "blk.00.attn_q.weight", "v.patch_embd.weight"])
def test_a_tensor_that_the_architecture_does_not_have_is_refused_by_name(name: str, tmp_path: Path) -> None:
    model = random_model("llama")
    path = converted(tmp_path / "model.gguf", model, LLAMA_KEYS, {name: (np.zeros((2, 2), np.float32), Kind.F32)})
    with pytest.raises(CheckpointError, match=f"unexpected {name}"):
        catalog.resolve(str(path))
