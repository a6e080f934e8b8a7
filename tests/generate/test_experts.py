"""Mixtures of experts compute what transformers computes, and read only the experts that a row chose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from generate.cpu.experts import Experts, route
from generate.params import GREEDY
from generate.runner import ModelRunner
from models import adapters, families
from models.architecture import Architecture
from models.network import Network, Projection
from policies import get_policy
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.scheduler import Output, Scheduler
from scheduling.sequence import Sequence
from tests.support.families import PAGE_SIZE, PAGES, PROMPTS, build_pair, check_adapter, check_equal, check_near
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


@pytest.mark.parametrize(("quantize", "bound", "more"), [("none", 0.05, 0), ("int8", 0.15, 0.005), ("int4", 0.4, 0.03)])
@pytest.mark.parametrize("shape", ["mixtral", "qwen3_moe"])
def test_formats_of_16_8_and_4_bits_are_near(
    shape: str, quantize: str, bound: float, more: float, tmp_path: Path
) -> None:
    """The last bound is on how many more bits a text takes on average that the model in 16 bits draws."""
    hf, network = build(shape, tmp_path, torch.bfloat16)
    check_near(hf, network, quantize, bound)

    def logs(quantize: str) -> torch.Tensor:
        runner = ModelRunner(build(shape, tmp_path, torch.bfloat16)[1], PAGES, PAGE_SIZE, quantize=quantize)
        return logits_of(runner, [PROMPTS[-1]])[0].log_softmax(-1)

    exact = logs("none")
    assert (exact.exp() * (exact - logs(quantize))).sum() <= -more * (exact.exp() * exact).sum()


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
    folder = tmp_path / "adapter"
    check_adapter(hf, network, folder, ("q_proj", "o_proj"))
    file = folder / "adapter_model.safetensors"
    named = {name.replace("self_attn.q_proj", "mlp.experts.0.up_proj"): x for name, x in load_file(file).items()}
    save_file(named, file)
    with pytest.raises(adapters.AdapterError, match=r"mlp.experts.0.up_proj.*outside a mixture of experts"):
        adapters.load(folder, network.config, families.by_model_type()["qwen3_moe"].layout)


@pytest.mark.parametrize("shape", ["mixtral", "qwen3_moe"])
def test_each_layer_reads_each_expert_that_a_row_chose_once(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Served with real contexts, pieces of prompts among decodes: the count is that of the router's choices."""
    runner = ModelRunner(build(shape, tmp_path)[1], PAGES, PAGE_SIZE)
    chosen: list[list[int]] = []  # of each layer of a step
    calls: list[int] = []  # the ids of the experts that computed

    def routed(logits: torch.Tensor, config: Architecture) -> tuple[torch.Tensor, torch.Tensor]:
        found = route(logits, config)
        chosen.append(found[0].flatten().tolist())
        return found

    monkeypatch.setattr("generate.cpu.experts.route", routed)
    for mixture in runner._mixtures:
        for i, (first, second) in enumerate(mixture.experts):
            mixture.experts[i] = (lambda x, first=first: calls.append(id(first)) or first(x), second)
    steps: list[tuple[int, int]] = []  # rows and experts read

    def forward(plan: Plan) -> list[Output]:
        chosen.clear()
        calls.clear()
        outputs = runner.forward(plan)
        distinct = sum(len(set(experts)) for experts in chosen)
        assert plan.experts == (distinct, 3 * runner.config.experts)
        assert len(calls) == len(set(calls)) == distinct
        steps.append((len(chosen[0]) // runner.config.experts_chosen, distinct))
        return outputs

    scheduler = Scheduler(get_policy("dynamic", max_batch_size=8), PagePool(PAGES, PAGE_SIZE), 96)
    for i, prompt in enumerate(PROMPTS[:6]):
        scheduler.add(Sequence(prompt, 3, id=str(i), sampling=GREEDY))
    while not scheduler.is_idle:
        scheduler.step(forward, lambda: 0.0)
    assert any(rows < distinct for rows, distinct in steps)
    assert any(rows > distinct for rows, distinct in steps)
