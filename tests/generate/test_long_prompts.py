"""A prompt of 1,500 tokens, in pieces and beside a short one: tokens and log probabilities are those of transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from generate.params import SamplingParams
from generate.runner import ModelRunner
from scheduling.sequence import Sequence
from tests.generate import test_experts, test_families
from tests.support.families import PAGE_SIZE, build_pair
from tests.support.generate import run

CONTEXT, LENGTHS, ANSWER, PAGES = 1600, (1500, 1), 5, 60
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    **test_families.SHAPES, **test_experts.SHAPES, "llama": ("llama", {"num_key_value_heads": 2})
}  # fmt: skip
# Those in which the length changes what is computed, and two plain ones.
QUICK = (
    "gpt2", "llama", "mistral, a window of 256, heads of 6", "qwen2, windows from layer 1", "qwen3, a window in layer 1",
    "gemma2, sharp caps", "gemma3, heads of 10, every second layer", "phi3, heads in part, long factors", "bloom, 3 heads",
    "mixtral, one expert, heads of 10, a window", "qwen3_moe, tied, one of three, a window",
)  # fmt: skip


@pytest.mark.parametrize("shape", [pytest.param(s, marks=() if s in QUICK else pytest.mark.full) for s in SHAPES])
def test_a_long_prompt_has_the_probabilities_and_the_answer_of_transformers(shape: str, tmp_path: Path) -> None:
    model_type, changes = SHAPES[shape]
    context = {"seq_length" if model_type == "bloom" else "max_position_embeddings": CONTEXT}
    hf, network = build_pair(model_type, {**changes, **context}, len(shape), tmp_path)
    rng, asked = random.Random(1), SamplingParams(temperature=0, logprobs=0, prompt_logprobs=0)
    prompts = [[rng.randrange(211) for _ in range(n)] for n in LENGTHS]
    sequences = [Sequence(prompt, ANSWER, id=str(i), sampling=asked) for i, prompt in enumerate(prompts)]
    run(None, sequences, budget=512, pages=PAGES, runner=ModelRunner(network, PAGES, PAGE_SIZE))
    for seq in sequences:
        text = torch.tensor(seq.prompt_ids + seq.output_ids)
        with torch.inference_mode():
            expected = hf(text[None, :-1]).logits[0].log_softmax(-1)
        assert expected[-ANSWER:].argmax(-1).tolist() == seq.output_ids
        found = torch.tensor([detail.logprob for detail in seq.prompt_details + seq.details])
        torch.testing.assert_close(found, expected.gather(1, text[1:, None])[:, 0], rtol=0, atol=1e-4)
