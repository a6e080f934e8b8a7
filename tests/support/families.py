"""What tests of model families share: small models with random weights, held against transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from generate.cpu.adapters import AdapterRows, PreparedAdapter
from generate.gpu.runner import GpuRunner
from generate.params import GREEDY
from generate.runner import ModelRunner
from models import adapters, families, weights
from models.network import Network
from models.sources import catalog
from scheduling.sequence import Sequence
from tests.support.checkpoints import judged, merged, randomized, save, transformers, write_adapter
from tests.support.generate import logits_of, run

SHAPE = {"vocab_size": 211, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
         "num_attention_heads": 6, "max_position_embeddings": 320}  # fmt: skip
UNKNOWN = {
    "gpt2": ("intermediate_size",),
    "falcon": ("intermediate_size",),
    "bloom": ("intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers"),
}
LENGTHS = (1, 2, 15, 16, 17, 255, 256, 257)
PROMPTS = [random.Random(n).choices(range(211), k=n) for n in LENGTHS]
PAGES, PAGE_SIZE, ANSWER = 60, 64, 6


def random_hf(model_type: str, changes: dict[str, Any], seed: int) -> Any:
    """Return transformers' model of SHAPE with these changes."""
    torch.manual_seed(seed)
    known = {key: value for key, value in SHAPE.items() if key not in UNKNOWN.get(model_type, ())}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return randomized(transformers().AutoConfig.for_model(model_type, **{**known, **ids, **changes}))


def build_pair(
    model_type: str, changes: dict[str, Any], seed: int, folder: Path, dtype: torch.dtype = torch.float32
) -> tuple[Any, Network]:
    """Return transformers' model of SHAPE with these changes, and ours of the files that transformers saved."""
    hf = random_hf(model_type, changes, seed)
    return hf, weights.load(catalog.resolve(str(save(folder, hf, max_shard_size="60KB"))), dtype)


def answers(runner: Any, slots: int) -> list[list[int]]:
    """Return the greedy answers to PROMPTS, served in pieces."""
    sequences = [Sequence(prompt, ANSWER, id=str(i), sampling=GREEDY) for i, prompt in enumerate(PROMPTS)]
    return run(None, sequences, slots=slots, budget=96, pages=PAGES, runner=runner)


def check_equal(hf: Any, network: Network) -> None:
    """Assert that both runners answer as transformers, alone and in a batch, and that the logits have the same bits there."""
    gpu = GpuRunner(network, PAGES, PAGE_SIZE)  # before the CPU's runner takes the blocks out
    runner = ModelRunner(network, PAGES, PAGE_SIZE)
    served = answers(runner, slots=8)
    assert served == [[token for token, _ in judged(hf, *pair)] for pair in zip(PROMPTS, served)]
    assert answers(runner, slots=1) == answers(gpu, slots=8) == served
    together = logits_of(runner, PROMPTS)
    for prompt, among in zip(PROMPTS, together):
        assert torch.equal(logits_of(runner, [prompt])[0], among)
    with torch.inference_mode():
        expected = hf(torch.tensor([PROMPTS[-1]])).logits[0].log_softmax(-1)
    torch.testing.assert_close(together[-1].log_softmax(-1), expected, rtol=0, atol=1e-4)


def check_near(hf: Any, network: Network, quantize: str, bound: float) -> None:
    """Assert that the summed distance of probabilities is below `bound`, and that bits are the same alone and in a batch."""
    runner = ModelRunner(network, PAGES, PAGE_SIZE, quantize=quantize)
    with torch.inference_mode():
        expected = hf(torch.tensor([PROMPTS[-1]])).logits[0].softmax(-1)
    together = logits_of(runner, PROMPTS)
    assert torch.equal(logits_of(runner, [PROMPTS[4]])[0], together[4])
    assert (together[-1].softmax(-1) - expected).abs().sum(-1).mean() < bound


def check_adapter(hf: Any, network: Network, folder: Path, targets: tuple[str, ...]) -> None:
    """Assert that logits with an adapter of the layers `targets`, which is left in `folder`, are those of the merged model."""
    config, layout = network.config, families.by_model_type()[hf.config.model_type].layout
    loaded = adapters.load(write_adapter(folder, hf, targets=targets), config, layout)
    rows = AdapterRows.of([(PreparedAdapter(loaded, config, torch.float32), 257)], 257)
    found = logits_of(ModelRunner(network, PAGES, PAGE_SIZE), [PROMPTS[-1]], rows)[0]
    with torch.inference_mode():
        expected = merged(hf, folder)(torch.tensor([PROMPTS[-1]])).logits[0]
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=1e-3)
