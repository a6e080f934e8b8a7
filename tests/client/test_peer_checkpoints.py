"""What `benchmarks.peers` writes for peers: a checkpoint of what we serve, also in int8, and a GGUF file in fewer bits."""

from __future__ import annotations

import base64
import json
import stat
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.peers import __main__ as peers
from benchmarks.peers import checkpoint, compressed
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.peer import Job
from models import weights
from models.sources import catalog
from models.text import ranks
from models.text.ranks import ALPHABET, EOT
from tests.support import gguf, tokenizers


@pytest.mark.parametrize("kind", ["gpt2", "smollm", "llama-bpe", "qwen2"])
def test_the_folder_of_a_gguf_file_has_its_numbers_and_its_tokens(tmp_path: Path, kind: str) -> None:
    metadata = tokenizers.gguf_metadata(kind)
    model = gguf.random_model("llama", vocab_size=len(metadata["tokenizer.ggml.tokens"]))
    file = gguf.converted(tmp_path / "model.gguf", model, {**gguf.LLAMA_KEYS, **metadata})
    source = catalog.resolve(str(file))
    folder = checkpoint.write_folder(source, tmp_path / "folder")
    pairs = zip(*(weights.load(m, "bfloat16").tensors() for m in (source, catalog.resolve(str(folder)))), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    written, reference = Tokenizer.from_file(str(folder / "tokenizer.json")), tokenizers.train(kind)
    for text in tokenizers.strings(100):
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for tokenizer in (written, reference)]
        assert ids[0] == ids[1], text


def test_the_tokens_of_ranks_are_written_with_the_merges_that_make_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = tokenizers.train("gpt2").get_vocab(with_added_tokens=False)
    learned = vocabulary.keys() - tokenizers.CONTROL
    tokens = sorted(learned, key=vocabulary.__getitem__)
    lines = [base64.b64encode(bytes(ALPHABET[c] for c in t)) + b" %d" % i for i, t in enumerate(tokens)]
    file = tmp_path / "ranks.tiktoken"
    file.write_bytes(b"\n".join(lines))
    monkeypatch.setenv("EB_TOKENIZER_FILE", str(file))
    shape = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 8, "vocab_size": 700}
    source = catalog.ResolvedModel("small", None, "dummy", None, None, shape, None)
    folder = checkpoint.write_folder(source, tmp_path / "folder")
    written, reference = Tokenizer.from_file(str(folder / "tokenizer.json")), ranks.from_file(file)
    for text in (t for t in tokenizers.strings(100) if EOT not in t):
        assert written.encode(text).ids == reference.encode_ordinary(text), text


def test_llama_cpp_rounds_a_file_by_the_tool_beside_its_server(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"weights")
    tool = tmp_path / "llama-quantize"
    tool.write_text('#!/bin/sh\n[ "$4" = Q4_0 ] && cp "$2" "$3"\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    job = Job("model", None, tmp_path / "model.gguf", tmp_path, slots=4, context=512, threads=1)
    peer = LlamaCpp(tmp_path / "llama-server", "Q4_0", job)
    peer.prepare()
    assert peer.gguf().read_bytes() == b"weights"
    assert str(peer.gguf()) in peer.command(1)


def test_random_weights_are_written_once_and_served_by_all(tmp_path: Path) -> None:
    args = peers.arguments(["--model", "bard", "--load-format", "dummy"])
    job = peers.job_of(args, tmp_path)
    assert job.folder is not None
    assert job.model == str(job.folder)
    before = (job.folder / "model.safetensors").stat().st_mtime_ns
    assert peers.job_of(args, tmp_path) == job
    assert (job.folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_checkpoint_in_int8_is_within_half_a_step_of_the_weights_and_says_how_it_is_rounded(tmp_path: Path) -> None:
    model = gguf.random_model("gpt2", n_embd=64, n_inner=128)
    model.save_pretrained(tmp_path / "source")
    folder = compressed.write(tmp_path / "source", tmp_path / "rounded", "int8")
    stored, exact = compressed.load_file(str(folder / "model.safetensors")), model.state_dict()
    name = "transformer.h.1.mlp.c_fc"
    scale = stored[f"{name}.weight_scale"].float().T
    assert ((stored[f"{name}.weight"] * scale - exact[f"{name}.weight"]).abs() <= scale * 0.51).all()
    assert torch.equal(stored["transformer.ln_f.weight"], exact["transformer.ln_f.weight"])
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == 8


def test_a_checkpoint_in_int4_is_within_half_a_step_of_the_weights_and_refuses_what_does_not_fit(
    tmp_path: Path,
) -> None:
    model = gguf.random_model("llama", intermediate_size=64)
    model.save_pretrained(tmp_path / "source")
    folder = compressed.write(tmp_path / "source", tmp_path / "rounded", "int4")
    stored, name = compressed.load_file(str(folder / "model.safetensors")), "model.layers.1.mlp.down_proj.weight"
    exact, packed = model.state_dict()[name].float(), stored[f"{name}_packed"]
    whole = (packed.unsqueeze(-1) >> torch.arange(0, 32, 4)).bitwise_and(15).view(exact.shape) - 8
    scale = stored[f"{name}_scale"].float().repeat_interleave(compressed.GROUP, 1)
    assert ((whole * scale - exact).abs() <= scale * 0.51).all()
    assert stored[f"{name}_shape"].tolist() == [*exact.shape]
    gguf.random_model("gpt2").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="int4 needs"):
        compressed.write(tmp_path / "gpt2", tmp_path / "none", "int4")
