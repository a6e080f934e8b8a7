"""What is wrong with an adapter's files is refused by the name of the setting or the tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import adapters, families
from models.sources.checkpoint import CheckpointError
from tests.support.checkpoints import reference, reference_of, write_adapter

NAME = "base_model.model.transformer.h.1.attn.c_attn.lora_A.weight"


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return reference()


def read(folder: Path, hf: Any) -> adapters.Adapter:
    raw = hf.config.to_dict()
    return adapters.load(folder, families.architecture_of(raw), families.family_of(raw).layout)


def changed(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Change tensors of an adapter, or take out those that are None; a double underscore stands for a dot."""
    path = folder / "adapter_model.safetensors"
    stored = load_file(path)
    for name, tensor in tensors.items():
        if tensor is None:
            del stored[name.replace("__", ".")]
        else:
            stored[name.replace("__", ".")] = tensor
    save_file(stored, path)


def reason(folder: Path, hf: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(folder, hf)
    return str(caught.value)


def test_all_products_are_read_with_their_places(gpt2: Any, tmp_path: Path) -> None:
    adapter = read(write_adapter(tmp_path, gpt2, rank=3), gpt2)
    assert adapter.rank == 3
    assert adapter.modules == ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    assert {(p.layer, p.part, p.start) for p in adapter.products} == {
        (layer, part, 0) for layer in range(2) for part in ("qkv", "attn_proj", "fc", "mlp_proj")
    }


def test_the_digest_is_that_of_the_numbers(gpt2: Any, tmp_path: Path) -> None:
    digests = [read(write_adapter(tmp_path / str(i), gpt2, seed=i // 2), gpt2).digest for i in range(3)]
    assert digests[0] == digests[1] != digests[2]
    twice = read(write_adapter(tmp_path / "twice", gpt2, lora_alpha=16), gpt2)
    assert twice.digest != digests[0]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "alpha_pattern"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"r": 0}, "r to 0"),
        ({"r": 4096}, "r to 4096"),
        ({"r": "4"}, "r to '4'"),
        ({"lora_alpha": -1}, "lora_alpha"),
        ({"something_new": 3}, "something_new"),
    ],
)
def test_a_setting_that_is_not_computed_is_refused_by_name(
    settings: dict[str, Any], named: str, gpt2: Any, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path, gpt2)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    assert named in reason(folder, gpt2)


@pytest.mark.parametrize(
    ("settings"),
    [
        {"use_dora": False},
        {"modules_to_save": None},
        {"init_lora_weights": "gaussian"},
        {"loftq_config": {}},
        {"peft_version": "9"},
    ],
)
def test_settings_that_change_nothing_are_taken(settings: dict[str, Any], gpt2: Any, tmp_path: Path) -> None:
    assert read(write_adapter(tmp_path, gpt2, **settings), gpt2).products


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (NAME, torch.zeros(5, 16), "[5, 16] but should be [4, 16]"),
        (NAME, torch.zeros(4, 17), "[4, 17] but should be [4, 16]"),
        (NAME.replace("_A", "_B"), torch.zeros(16, 4), "[16, 4] but should be [48, 4]"),
        (NAME, torch.full((4, 16), torch.nan), "NaN"),
        (NAME, torch.zeros(4, 16, dtype=torch.int32), "I32"),
        (NAME, None, "lacks"),
        ("base_model.model.transformer.h.2.attn.c_attn.lora_A.weight", torch.zeros(4, 16), "no linear layer"),
        ("base_model.model.transformer.wte.lora_embedding_A", torch.zeros(4, 16), "no linear layer"),
        ("base_model.model.lm_head.lora_A.weight", torch.zeros(4, 16), "no linear layer"),
        ("base_model.model.transformer.h.0.ln_1.lora_A.weight", torch.zeros(4, 16), "no linear layer"),
        (NAME.replace("transformer.", ""), torch.zeros(4, 16), "is the same layer"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    name: str, tensor: torch.Tensor | None, said: str, gpt2: Any, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path, gpt2)
    changed(folder, **{name.replace(".", "__"): tensor})
    text = reason(folder, gpt2)
    assert name.removesuffix(".lora_A.weight") in text
    assert said in text


def test_an_adapter_of_another_model_is_refused_by_its_tensors(gpt2: Any, tmp_path: Path) -> None:
    llama = reference_of("llama")
    assert "model.layers.0." in reason(write_adapter(tmp_path / "llama", llama), gpt2)
    wider = reference_of("llama", hidden_size=72)
    assert "[72, 4] but should be [48, 4]" in reason(write_adapter(tmp_path / "wider", wider), llama)


def test_pickles_and_missing_or_broken_files_are_refused(gpt2: Any, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, gpt2)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "broken or truncated" in reason(folder, gpt2)
    weights.unlink()
    assert "has no adapter_model.safetensors" in reason(folder, gpt2)
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n")
    assert "pickle" in reason(folder, gpt2)
    (folder / "adapter_config.json").write_text("{")
    assert "invalid JSON" in reason(folder, gpt2)
    (folder / "adapter_config.json").write_text(" " * 200_000)
    assert "200,000 bytes" in reason(folder, gpt2)
    (folder / "adapter_config.json").unlink()
    assert "has no adapter_config.json" in reason(folder, gpt2)
    assert "has no adapter_config.json" in reason(tmp_path / "nowhere", gpt2)
