"""Each family in several shapes computes what transformers computes, alone and among others."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from generate.params import GREEDY
from generate.runner import ModelRunner
from models import weights
from models.sources import catalog
from scheduling.sequence import Sequence
from tests.support.checkpoints import judged, reference, reference_of, save
from tests.support.generate import logits_of, run

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_positions": 160}),
    "llama, 3:1": ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}),
    "llama, 1:1, tied": ("llama", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "llama, 8:1, llama3 scaling": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "rope_parameters": LLAMA3}),
    "llama, linear scaling": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0}}),
    "llama, biases, gelu": ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama, heads of 64": ("llama", {"head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"rms_norm_eps": 0.1}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True, "num_attention_heads": 6}),
    "qwen2": ("qwen2", {"num_attention_heads": 8, "num_key_value_heads": 1, "hidden_size": 64}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, tied, biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 6}),
}  # fmt: skip
PAGES, PAGE_SIZE = 200, 64

pytestmark = pytest.mark.usefixtures("kernels_or_plain")


def build(shape: str, folder: Path) -> tuple[Any, ModelRunner]:
    """Return transformers' model, and a runner of the files that transformers saved."""
    model_type, changes = SHAPES[shape]
    hf = reference(**changes) if model_type == "gpt2" else reference_of(model_type, **changes)
    resolved = catalog.resolve(str(save(folder, hf)))
    return hf, ModelRunner(weights.load(resolved), PAGES, PAGE_SIZE)


def tokens(n: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(211), k=n)


def served(runner: ModelRunner, prompts: list[list[int]], n: int, slots: int) -> list[list[int]]:
    """Return the greedy answers, three new requests before each step and prompts in pieces."""
    sequences = [Sequence(prompt, n, id=str(i), sampling=GREEDY) for i, prompt in enumerate(prompts)]
    return run(None, sequences, slots=slots, budget=96, pages=PAGES, runner=runner)


def assert_greedy(hf: Any, prompts: list[list[int]], answers: list[list[int]], n: int) -> None:
    """Hold the answers to be the n tokens that transformers chooses."""
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == n
        assert answer == [token for token, _ in judged(hf, prompt, answer)]


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_greedy_tokens_are_those_of_transformers(shape: str, tmp_path: Path) -> None:
    hf, runner = build(shape, tmp_path)
    ids = tokens(150, 1)
    with torch.inference_mode():
        expected = hf(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_of(runner, [ids])[0], expected, rtol=1e-4, atol=1e-4)
    prompts = [tokens(n, n) for n in (1, 9, 70)]
    assert_greedy(hf, prompts, served(runner, prompts, 16, slots=3), 16)


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
def test_fifty_greedy_answers_among_64_are_those_of_transformers_and_some_alone(shape: str, tmp_path: Path) -> None:
    hf, runner = build(shape, tmp_path)
    prompts = [tokens(random.Random(i).randrange(1, 100), i) for i in range(64)]
    answers = served(runner, prompts, 32, slots=64)
    assert len({tuple(ids) for ids in answers[:50]}) > 30
    assert_greedy(hf, prompts[:50], answers[:50], 32)
    assert served(runner, prompts[:20], 32, slots=1) == answers[:20]
