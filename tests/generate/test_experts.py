"""Mixtures of experts compute what transformers computes, and read only the experts that a row chose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.offline import decoding
from generate.cpu.adapters import AdapterRows, PreparedAdapter
from generate.cpu.experts import Experts
from generate.runner import ModelRunner
from models import adapters, families
from models.network import Network, Projection
from scheduling.iteration import Plan
from tests.support.checkpoints import merged, write_adapter
from tests.support.families import PAGE_SIZE, PAGES, PROMPTS, build_pair, check_equal, check_near
from tests.support.generate import logits_of

QWEN = {"moe_intermediate_size": 28, "num_key_value_heads": 2}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_key_value_heads": 2, "num_local_experts": 4}),
    "mixtral, tied, three of five": ("mixtral", {
        "num_attention_heads": 4, "num_key_value_heads": 1, "num_local_experts": 5, "num_experts_per_tok": 3,
        "tie_word_embeddings": True,
    }),
    "mixtral, one expert, heads of 10, a window": ("mixtral", {
        "num_key_value_heads": 3, "head_dim": 10, "num_local_experts": 1, "num_experts_per_tok": 1, "sliding_window": 47,
    }),
    "qwen3_moe": ("qwen3_moe", {**QWEN, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "qwen3_moe, not normalized, heads of 10, biases": ("qwen3_moe", {
        **QWEN, "head_dim": 10, "num_experts": 7, "num_experts_per_tok": 3, "attention_bias": True
    }),
    "qwen3_moe, tied, one of three, a window": ("qwen3_moe", {
        **QWEN, "num_attention_heads": 4, "num_key_value_heads": 1, "num_experts": 3, "num_experts_per_tok": 1,
        "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 100,
    }),
}  # fmt: skip


def build(shape: str, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Network]:
    return build_pair(*SHAPES[shape], len(shape), folder, dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_probabilities_and_greedy_answers_are_those_of_transformers(shape: str, tmp_path: Path) -> None:
    check_equal(*build(shape, tmp_path))


@pytest.mark.parametrize(("quantize", "bound"), [("none", 0.05), ("int8", 0.15), ("int4", 0.4)])
@pytest.mark.parametrize("shape", ["mixtral", "qwen3_moe"])
def test_formats_of_16_8_and_4_bits_are_near(shape: str, quantize: str, bound: float, tmp_path: Path) -> None:
    check_near(*build(shape, tmp_path, torch.bfloat16), quantize, bound)


def test_only_experts_that_a_row_chose_are_read_and_counted(tmp_path: Path) -> None:
    network = build("mixtral", tmp_path)[1]
    config = replace(network.config, experts_chosen=1)
    block = network.blocks[0]
    block.router = Projection(torch.zeros(4, 48))
    block.router.weight[1, 0], block.router.weight[3, 1] = 9, 9  # a router by hand: the first two inputs name 1 and 3
    experts = Experts(block, config)
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    x[:, :2] = torch.tensor([1.0, 0.0])
    first = experts(x)
    assert experts.read == 1
    x[2, :2] = torch.tensor([0.0, 1.0])
    among = experts(x)
    assert experts.read == 2
    assert torch.equal(among[[0, 1, 3, 4]], first[[0, 1, 3, 4]])
    fc, proj = (part.weight for part in block.mlps()[3])
    gate, up = (fc @ x[2]).chunk(2)
    torch.testing.assert_close(among[2], proj @ (torch.nn.functional.silu(gate) * up))


def test_adapters_of_attention_are_served_and_those_of_experts_refused(tmp_path: Path) -> None:
    hf, network = build("qwen3_moe", tmp_path / "model")
    config, layout = network.config, families.by_model_type()["qwen3_moe"].layout
    folder = write_adapter(tmp_path / "adapter", hf, targets=("q_proj", "o_proj"))
    adapter = PreparedAdapter(adapters.load(folder, config, layout), config, torch.float32)
    rows = AdapterRows.of([(adapter, 257)], 257)
    found = logits_of(ModelRunner(network, PAGES, PAGE_SIZE), [PROMPTS[-1]], rows)[0]
    with torch.inference_mode():
        expected = merged(hf, folder)(torch.tensor([PROMPTS[-1]])).logits[0]
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=1e-3)
    file = folder / "adapter_model.safetensors"
    named = {name.replace("self_attn.q_proj", "mlp.experts.0.up_proj"): x for name, x in load_file(file).items()}
    save_file(named, file)
    with pytest.raises(adapters.AdapterError, match=r"mlp.experts.0.up_proj.*outside a mixture of experts"):
        adapters.load(folder, config, layout)


def test_a_step_tells_how_many_experts_all_layers_read(tmp_path: Path) -> None:
    runner = ModelRunner(build("mixtral", tmp_path)[1], 80, PAGE_SIZE)
    read = []
    for rows in (1, 8, 32):
        plan = Plan(1, 0.0, decoding(runner, rows, 20, 0.0), [1] * rows)
        runner.forward(plan)
        assert plan.experts is not None
        assert plan.experts.of == 3 * 4
        read.append(plan.experts.read)
    assert read[0] == 3 * 2 < read[1] <= read[2] <= 12
