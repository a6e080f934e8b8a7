"""Models are found by name and folder or refused, and their weights are right."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import family, weights
from models.activations import ACTIVATIONS
from models.gpt2 import GPT
from models.sources import catalog, checkpoint
from tests.support.checkpoints import reference, reference_of, save, transformers

SHAPES = {
    "heads of 8": {},
    "heads of 16, inner 40, erf": {"n_embd": 48, "n_head": 3, "n_inner": 40, "activation_function": "gelu"},
    "heads of 32, relu, wide epsilon": {"n_embd": 64, "activation_function": "relu", "layer_norm_epsilon": 0.1},
    "heads of 64, odd vocabulary": {"n_embd": 128, "vocab_size": 1009, "n_layer": 1},
    "unscaled attention": {"scale_attn_weights": False},
    "attention scaled by layer": {"scale_attn_by_inverse_layer_idx": True, "n_layer": 4},
    "untied head": {"tie_word_embeddings": False},
    "swish": {"activation_function": "swish"},
}
pytestmark = pytest.mark.usefixtures("one_thread")


@torch.no_grad()
def greedy(forward: Any, ids: list[int], n: int) -> list[int]:
    ids = list(ids)
    for _ in range(n):
        ids.append(int(forward(torch.tensor([ids]))[0, -1].argmax()))
    return ids


@torch.no_grad()
def assert_same(hf: Any, gpt: GPT) -> None:
    ids = torch.randint(0, hf.config.vocab_size, (2, 19), generator=torch.Generator().manual_seed(1))
    ours, _ = gpt(ids, targets=ids)
    torch.testing.assert_close(ours, hf(ids).logits, rtol=1e-4, atol=1e-4)
    prompt = ids[0, :5].tolist()
    assert greedy(lambda x: gpt(x)[0], prompt, 24) == greedy(lambda x: hf(x).logits, prompt, 24)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save(tmp_path / "tiny", reference())


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_logits_and_greedy_tokens_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    hf = reference(**changes)
    resolved = catalog.resolve(str(save(tmp_path, hf)))
    assert_same(hf, weights.load_gpt(resolved))


def test_the_shards_of_an_index_are_joined(tmp_path: Path) -> None:
    hf = reference(n_layer=4)
    save(tmp_path, hf, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(hf, weights.load_gpt(catalog.resolve(str(tmp_path))))
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(checkpoint.CheckpointError, match=gone.name):
        catalog.resolve(str(tmp_path))
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(checkpoint.CheckpointError, match=r"model\.safetensors\.index\.json"):
        catalog.resolve(str(tmp_path))


def test_causal_masks_stored_by_old_versions_are_ignored(tiny: Path) -> None:
    hf = transformers().GPT2LMHeadModel.from_pretrained(tiny).eval()
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 48, 48).tril().bool(),
             "transformer.h.0.attn.masked_bias": torch.tensor(-1e4)}  # fmt: skip
    _rewrite(tiny, lambda state: state.update(masks))
    assert_same(hf, weights.load_gpt(catalog.resolve(str(tiny))))


def test_names_without_prefix_and_a_head_instead_of_the_embedding_are_read(tiny: Path) -> None:
    hf = transformers().GPT2LMHeadModel.from_pretrained(tiny).eval()
    state = {name.removeprefix("transformer."): tensor
             for name, tensor in load_file(tiny / "model.safetensors").items()}  # fmt: skip
    save_file(state, tiny / "model.safetensors")
    assert_same(hf, weights.load_gpt(catalog.resolve(str(tiny))))
    state["lm_head.weight"] = state.pop("wte.weight")
    save_file(state, tiny / "model.safetensors")
    gpt = weights.load_gpt(catalog.resolve(str(tiny)))
    assert_same(hf, gpt)
    assert gpt.lm_head.weight is gpt.transformer.wte.weight


def test_a_head_that_differs_from_a_tied_embedding_is_kept_as_transformers_keeps_it(tmp_path: Path) -> None:
    hf = reference(tie_word_embeddings=False)
    save(tmp_path, hf)
    edit(tmp_path, tie_word_embeddings=True)
    gpt = weights.load_gpt(catalog.resolve(str(tmp_path)))
    assert_same(hf, gpt)
    assert not gpt.config.tie_word_embeddings


def test_weights_have_the_requested_dtype_and_no_gradients(tiny: Path) -> None:
    gpt = weights.load_gpt(catalog.resolve(str(tiny)), "bfloat16")
    assert {p.dtype for p in gpt.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in gpt.parameters())
    assert not gpt.training


def test_random_weights_need_only_a_shape_and_are_the_same_each_time() -> None:
    resolved = catalog.resolve("gpt2-medium", "dummy")
    assert (resolved.name, resolved.path) == ("gpt2-medium", None)
    small = catalog.replace(resolved, config={**resolved.config, "n_layer": 2, "n_embd": 128, "n_head": 2})
    one, two = (weights.load_gpt(small, "float32", seed=5) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
    with torch.no_grad():
        logits, _ = one(torch.arange(40)[None], targets=torch.arange(40)[None])
    assert logits.isfinite().all()
    assert len(set(logits.argmax(-1)[0].tolist())) > 1
    assert one.transformer.h[0].mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(one.transformer.h[0].mlp.c_fc.weight, one.transformer.h[1].mlp.c_fc.weight)


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _rewrite(folder: Path, change: Any) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


PICKLES = ("pytorch_model.bin", "pytorch_model-00001-of-00002.bin")
BROKEN = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "JSON"),
    "another family": (lambda f: edit(f, model_type="opt"), "'opt'.*qwen3"),
    "cross attention": (lambda f: edit(f, add_cross_attention=True), "add_cross_attention"),
    "quantized": (lambda f: edit(f, quantization_config={"bits": 4}), "quantization_config"),
    "unknown activation": (lambda f: edit(f, activation_function="mish"), "mish"),
    "odd heads": (lambda f: edit(f, n_head=3), "n_head 3"),
    "no size": (lambda f: edit(f, n_layer=0), "n_layer to 0"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "--load-format dummy"),
    "a pickle": (lambda f: (f / "model.safetensors").rename(f / PICKLES[0]), rf"{PICKLES[0]}.*save_pretrained"),
    "pickles": (lambda f: (f / "model.safetensors").rename(f / PICKLES[1]), rf"{PICKLES[1]}.*save_pretrained"),
    "truncated": (_truncate, "truncated"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "truncated"),
    "not safetensors": (lambda f: (f / "model.safetensors").write_bytes(b"\x10" + bytes(99)), "header"),
    "another vocabulary": (lambda f: edit(f, vocab_size=300), r"wte.weight is \[211, 16\] but should be \[300"),
    "more layers": (lambda f: edit(f, n_layer=4), r"missing h.\{2,3\}.ln_1.weight"),
    "a strange tensor": (lambda f: _rewrite(f, lambda s: s.update(x=torch.ones(1))), "unexpected x"),
    "integers": (lambda f: _rewrite(f, lambda s: s.update({"transformer.ln_f.bias": torch.ones(16).int()})), "I32"),
}


@pytest.mark.parametrize(("spoil", "says"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_folder_is_refused_with_reason_and_remedy(tiny: Path, spoil: Any, says: str) -> None:
    spoil(tiny)
    with pytest.raises(checkpoint.CheckpointError, match=says) as refusal:
        catalog.resolve(str(tiny))
    assert re.search(r"\. .*(Use|use)", str(refusal.value))
    assert "\n" not in str(refusal.value)


def test_tensors_of_another_family_that_do_not_fit_are_all_named(tmp_path: Path) -> None:
    save(tmp_path, reference_of("llama"))
    edit(tmp_path, num_key_value_heads=3, attention_bias=True)
    with pytest.raises(checkpoint.CheckpointError) as refusal:
        catalog.resolve(str(tmp_path))
    problems = str(refusal.value)
    assert "missing layers.{0,1}.self_attn.q_proj.bias" in problems
    assert "layers.{0,1}.self_attn.v_proj.weight is [16, 48] but should be [24, 48]" in problems


def test_the_originals_module_refuses_another_family(tmp_path: Path) -> None:
    resolved = catalog.resolve(str(save(tmp_path, reference_of("qwen2"))))
    with pytest.raises(ValueError, match=r"qwen2, not a GPT-2\. Use bard"):
        weights.load_gpt(resolved)


def test_activations_are_the_models() -> None:
    assert set(family.ACTIVATIONS) == set(ACTIVATIONS)


def test_the_resolved_model_is_read_from_its_json(tiny: Path) -> None:
    for resolved in (catalog.resolve(str(tiny)), catalog.resolve("gpt2", "dummy")):
        assert catalog.ResolvedModel.from_json(resolved.to_json()) == resolved


def test_an_unknown_name_is_refused_with_the_nearest_and_the_list(tmp_path: Path) -> None:
    with pytest.raises(catalog.UnknownModel, match=r"Did you mean 'gpt2-medium'\? Use one of gpt2, .*bard"):
        catalog.resolve("gpt2-medum")
    with pytest.raises(catalog.UnknownModel, match="no such folder"):
        catalog.resolve(str(tmp_path / "nowhere"))
    with pytest.raises(catalog.UnknownModel, match="is a file"):
        catalog.resolve(__file__)
    with pytest.raises(ValueError, match="Use auto or dummy"):
        catalog.resolve("gpt2", "random")


def test_resolving_does_not_import_torch(tiny: Path) -> None:
    code = (
        "import sys; from models.sources import catalog; catalog.resolve(sys.argv[1]); sys.exit('torch' in sys.modules)"
    )
    root = Path(weights.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code, str(tiny)], cwd=root, timeout=60).returncode == 0


@pytest.mark.full
def test_loading_a_model_does_not_load_the_compiler() -> None:
    code = "import sys, torch; from models.sources import catalog; from models import weights; weights.load_gpt(catalog.resolve('bard'), torch.float32); print('torch._dynamo' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(weights.__file__).parents[1]
    )
    assert done.stdout.split() == ["False"], done.stderr
