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

pytest.importorskip("tokenizers", reason="the trainer needs tokenizers, of the extra `dev`")
from dev.tools import train_bard

SMALL = GPTConfig(vocab_size=300, n_layer=2, n_head=2, n_embd=128)


@pytest.fixture(scope="module")
def trainer() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "dev/tools/train_bard.py"))


def test_the_gradients_of_a_step_are_the_models() -> None:
    model = GPT(SMALL)
    model.init_weights(torch.Generator().manual_seed(2))
    ids = torch.randint(300, (3, 257), generator=torch.Generator().manual_seed(3))
    _, expected = model(ids[:, :-1], ids[:, 1:], 5)
    assert expected is not None
    expected.backward()
    exact = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    loss = train_bard.backward(model, ids[:, :-1], ids[:, 1:], 5)
    assert loss == pytest.approx(expected.item(), rel=1e-3)
    for name, parameter in model.named_parameters():
        if not name.endswith("c_attn.bias"):  # that of keys changes nothing: its gradient is rounding
            assert (parameter.grad - exact[name]).norm() < 0.02 * exact[name].norm(), name


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
    found = train_bard.bits_per_byte(model, ids, 1000, 256)
    assert found == pytest.approx(nats.item() / math.log(2) / 1000, rel=1e-3)


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
