"""Rows with LoRA adapters compute what the merged model does, whatever their neighbors; the others what they did."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from generate.cpu.adapters import AdapterRows, PreparedAdapter
from generate.params import GREEDY
from generate.runner import ModelRunner
from models import adapters, families, weights
from models.sources import catalog
from scheduling.sequence import Sequence
from tests.support.checkpoints import merged, reference, reference_of, save, targets_of, write_adapter
from tests.support.generate import logits_of, run

PAGES, PAGE_SIZE = 200, 64
WIDE = {"n_embd": 128, "n_head": 2, "n_positions": 160}  # heads of 64: all in C
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_positions": 160}),
    "llama, 3:1": ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}),
    "llama, biases, gelu": ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "qwen2": ("qwen2", {"num_attention_heads": 8, "num_key_value_heads": 1, "hidden_size": 64}),
    "qwen3": ("qwen3", {"head_dim": 16}),
}

pytestmark = pytest.mark.usefixtures("kernels_or_plain")


class Served:
    """A model of random numbers as transformers has it and as the engine does, with adapters for both."""

    def __init__(self, shape: str, folder: Path, dtype: str = "float32", **changes: Any) -> None:
        model_type, sizes = SHAPES[shape]
        sizes = {**sizes, **changes}
        self.hf = reference(**sizes) if model_type == "gpt2" else reference_of(model_type, **sizes)
        self.folder = folder
        resolved = catalog.resolve(str(save(folder / "base", self.hf)))
        self.config, self.layout = resolved.architecture, families.family_of(resolved.config).layout
        self.runner = ModelRunner(weights.load(resolved, dtype), PAGES, PAGE_SIZE)

    def adapter(self, number: int, **options: Any) -> tuple[PreparedAdapter, Any]:
        """Return an adapter, and transformers' model with it merged."""
        folder = write_adapter(self.folder / f"adapter{number}", self.hf, seed=number, **options)
        loaded = adapters.load(folder, self.config, self.layout)
        return PreparedAdapter(loaded, self.config, self.runner.dtype), merged(self.hf, folder)

    def logits(self, parts: list[tuple[list[int], PreparedAdapter | None]]) -> list[torch.Tensor]:
        """Return the logits of prompts that are computed in one step."""
        lengths = [(adapter, len(ids)) for ids, adapter in parts]
        return logits_of(
            self.runner, [ids for ids, _ in parts], AdapterRows.of(lengths, sum(length for _, length in lengths))
        )


def tokens(n: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(211), k=n)


@torch.no_grad()
def expected(hf: Any, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = hf(torch.tensor([ids])).logits[0]
    return logits


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_the_merged_model_beside_other_adapters_and_none(shape: str, tmp_path: Path) -> None:
    served = Served(shape, tmp_path)
    first, with_first = served.adapter(1)
    second, with_second = served.adapter(2, rank=6, use_rslora=True)
    prompts = [tokens(n, n) for n in (90, 5, 70, 33)]
    found = served.logits([*zip(prompts, [first, None, second, first])])
    for ids, hf, ours in zip(prompts, [with_first, served.hf, with_second, with_first], found):
        torch.testing.assert_close(ours, expected(hf, ids), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found[0], expected(served.hf, prompts[0]), atol=0.1)


@pytest.mark.parametrize(
    "options",
    [
        *({"targets": names} for names in (("c_attn",), ("mlp.c_fc",), ("q_proj", "v_proj"), ("up_proj", "o_proj"))),
        {"rank_pattern": {"k_proj": 2, "down_proj": 7}, "alpha_pattern": {"k_proj": 3, "up_proj": 20.5}},
    ],
)
def test_some_layers_only_may_change_and_have_a_rank_and_an_alpha_of_their_own(
    options: dict[str, Any], tmp_path: Path
) -> None:
    served = Served("gpt2" if "c_" in str(options) else "qwen3", tmp_path)
    adapter, hf = served.adapter(1, **options)
    ids = tokens(40, 1)
    torch.testing.assert_close(served.logits([(ids, adapter)])[0], expected(hf, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ["gpt2", "qwen3"])
def test_the_bits_of_a_row_do_not_depend_on_its_neighbors_or_their_adapters(
    shape: str, dtype: str, tmp_path: Path
) -> None:
    served = Served(shape, tmp_path, dtype, **(WIDE if shape == "gpt2" else {"head_dim": 64}))
    prepared = [served.adapter(i, rank=3 + i % 5)[0] for i in range(11)]
    parts = [(tokens(7 + 5 * (i % 11), i), [*prepared, None][i % 12]) for i in range(64)]
    together = served.logits(parts)
    for part, found in zip(parts, together):
        assert torch.equal(found, served.logits([part])[0])
    alone = served.logits([(ids, None) for ids, _ in parts])
    for (_, adapter), found, base in zip(parts, together, alone):
        assert torch.equal(found, base) == (adapter is None)


def test_bfloat16_in_c_is_near_the_layers_one_by_one(tmp_path: Path) -> None:
    served = Served("qwen3", tmp_path, "bfloat16", head_dim=64)
    adapter, hf = served.adapter(1, size=0.5)
    ids = tokens(60, 1)
    found, exact = served.logits([(ids, adapter)])[0], expected(hf, ids)
    base = served.logits([(ids, None)])[0]
    rounding = (base - expected(served.hf, ids)).std()  # of the model without the adapter
    assert (found - exact).std() < 2 * rounding
    assert (found - base).std() > 5 * rounding


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # peft's own
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "rank_pattern": {"down_proj": 2, "c_fc": 9}}])
def test_logits_are_those_of_peft(shape: str, options: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    served = Served(shape, tmp_path)
    made = peft.get_peft_model(
        served.hf,
        peft.LoraConfig(r=5, lora_alpha=11, target_modules=[*targets_of(served.hf)], task_type="CAUSAL_LM", **options),
    )
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.2)
    made.eval().save_pretrained(tmp_path / "peft")
    adapter = adapters.load(tmp_path / "peft", served.config, served.layout)
    ids = tokens(60, 4)
    found = served.logits([(ids, PreparedAdapter(adapter, served.config, torch.float32))])[0]
    torch.testing.assert_close(found, expected(made, ids), rtol=1e-4, atol=1e-4)


def answers(runner: ModelRunner, wanted: list[tuple[list[int], PreparedAdapter | None]], slots: int) -> list[list[int]]:
    """Return the greedy answers of 12 tokens, three new requests before each step and prompts in pieces."""
    sequences = [
        Sequence(ids, 12, id=str(i), sampling=GREEDY, adapter_weights=adapter, cache_salt=str(id(adapter)))
        for i, (ids, adapter) in enumerate(wanted)
    ]
    return run(None, sequences, slots=slots, budget=96, pages=PAGES, runner=runner)


def test_greedy_answers_are_the_same_alone_and_among_others_with_shared_prefixes(tmp_path: Path) -> None:
    served = Served("gpt2", tmp_path)
    prepared = [None, *(served.adapter(i)[0] for i in range(3))]
    start = tokens(70, 1)  # more than a page, which only requests with the same adapter may share
    wanted = [(start + tokens(1 + i % 3, i), prepared[i % 4]) for i in range(24)]
    alone = [answers(served.runner, [one], 1)[0] for one in wanted]
    assert answers(served.runner, wanted, 16) == alone
    assert len({tuple(alone[i]) for i in (0, 13, 2, 15)}) == 4


@pytest.mark.parametrize("kind", ["comedies", "tragedies"])
def test_the_adapters_that_ship_with_bard_fit_it_and_change_it(kind: str) -> None:
    resolved = catalog.resolve("bard")
    layout = families.family_of(resolved.config).layout
    adapter = adapters.load(catalog.BARD.parent / f"bard-{kind}", resolved.architecture, layout)
    assert (adapter.rank, len(adapter.products)) == (8, 24)
    assert all(product.b.abs().max() > 0 for product in adapter.products)
