"""The trainer of bard computes the gradients of the served model, and its results can be served and resumed."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from models import weights
from models.gpt2 import GPT, GPTConfig
from models.sources import catalog
from tests.support import ROOT

pytest.importorskip("tokenizers", reason="the trainer needs tokenizers, of requirements-dev.txt")
from tools import bard_training

SMALL = GPTConfig(vocab_size=300, n_layer=2, n_head=2, n_embd=128)


@pytest.fixture(scope="module")
def trainer() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "train_bard.py"))


def test_short_attention_has_flash_attentions_gradients() -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(3, 17, 8, dtype=torch.float64, generator=generator) for _ in range(4)]
    found, expected = (
        [p.clone().requires_grad_() for p in parts[:3]] for _ in range(2)
    )  # queries, keys and values, twice
    y = bard_training.ShortAttention.apply(*found, 0.3)
    y.backward(parts[3])
    z = F.scaled_dot_product_attention(*expected, is_causal=True, scale=0.3)
    z.backward(parts[3])
    torch.testing.assert_close(y, z)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("length", [256, 300], ids=["short", "long"])
def test_the_twin_has_the_models_loss_and_gradients(length: int) -> None:
    model = GPT(SMALL)
    model.init_weights(torch.Generator().manual_seed(2))
    twin = bard_training.for_training(model).float()
    ids = torch.randint(300, (3, length + 1), generator=torch.Generator().manual_seed(3))
    x, y = ids[:, :-1], ids[:, 1:]
    loss = bard_training.loss_and_gradients(twin, x, y, 5, rows=100)
    _, expected = model(x, y, 5)
    assert expected is not None
    expected.backward()
    # What is rounded are the weights, which the twin had in bfloat16 once.
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        if not name.endswith("c_attn.bias"):  # that of keys changes nothing: its gradient is rounding
            assert (a.grad - b.grad).norm() < 0.02 * a.grad.norm(), name


@pytest.mark.parametrize("length", [2, 300, 1024, 1025, 1026, 1281, 2700])
def test_each_token_counts_once(length: int) -> None:
    model = GPT(SMALL)  # of which what a token follows from is the one before it alone
    model.init_weights(torch.Generator().manual_seed(2))
    for name, parameter in model.named_parameters():
        if "wpe" in name or "c_proj" in name:
            torch.nn.init.zeros_(parameter)
    ids = torch.randint(300, (length,), generator=torch.Generator().manual_seed(3))
    ids[: length // 2] %= 7
    pairs, targets = ids[:-1, None], ids[1:, None]
    nats = F.cross_entropy(model(pairs, targets)[0][:, 0], targets[:, 0], reduction="sum")
    found = bard_training.bits_per_byte(model, ids, 1000, 256)
    assert found == pytest.approx(nats.item() / math.log(2) / 1000, rel=1e-3)


def test_dropout_by_bytes_keeps_the_mean() -> None:
    drop = bard_training.Dropout(0.3).train()
    dropped = drop(torch.ones(300, 1001))
    assert dropped.unique().tolist() == pytest.approx([0, 256 / (256 - 77)])
    assert dropped.mean().item() == pytest.approx(1, abs=0.01)
    assert torch.equal(drop.eval()(dropped), dropped)


@pytest.mark.full
def test_a_trained_model_can_be_served_and_resumed(
    trainer: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("".join(f"{n} bottles of beer on the wall\n" for n in range(700)))
    for name in ("train_tokenizer", "main"):
        monkeypatch.setitem(trainer[name].__globals__, "SHAPE", SMALL)
    losses = []
    for out, resume in (("first", []), ("second", ["--resume", str(tmp_path / "first")])):
        argv = ["train_bard.py", "--text", str(text), "--out", str(tmp_path / out), "--device", "cpu",
                "--steps", "6", "--tokens-per-step", "1024", *resume]  # fmt: skip
        monkeypatch.setattr(sys, "argv", argv)
        trainer["main"]()
        losses.append(json.loads(capsys.readouterr().out)["bits_per_byte"])
        loaded = weights.load_gpt(catalog.resolve(str(tmp_path / out)))
        assert loaded.config.n_layer == 2
    assert losses[1] < losses[0]
    card = (tmp_path / "second" / "README.md").read_text()
    assert f"{losses[1]:.4f} bits per byte" in card
    assert "--resume" in card

    argv = ["train_bard.py", "--text", str(text), "--out", str(tmp_path / "mean"), "--device", "cpu", "--steps", "0",
            "--resume", str(tmp_path / "second"), "--average", str(tmp_path / "first")]  # fmt: skip
    monkeypatch.setattr(sys, "argv", argv)
    trainer["main"]()
    first, second, mean = (
        weights.load_gpt(catalog.resolve(str(tmp_path / name))).state_dict() for name in ("first", "second", "mean")
    )
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, (first[name] + second[name]) / 2, atol=1e-5, rtol=1e-3)
    assert f"--average {tmp_path / 'first'}" in (tmp_path / "mean" / "README.md").read_text()


def test_bards_with_other_tokens_cannot_be_averaged(trainer: dict[str, Any], tmp_path: Path) -> None:
    tokenizers = [trainer["train_tokenizer"](text * 99, 300) for text in ("to be or not\n", "tomorrow and\n")]
    tokenizers[1].save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="other tokens"):
        trainer["weights_of"](tmp_path, tokenizers[0])
