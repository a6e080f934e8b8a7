"""Answers that have a form: valid, the same whatever runs beside them and however, and without effect on their neighbors."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
import pytest
import torch

import policies
from generate.constraint import Constraint
from generate.drafters.forced import ForcedDrafter
from generate.drafters.ngram import NgramDrafter
from generate.gpu.runner import GpuRunner
from generate.grammar import FormError
from generate.params import SamplingParams
from generate.runner import ModelRunner, Runner
from generate.sampling import Draws, History, NotFinite, sample
from models import weights
from models.sources import catalog
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from scheduling.speculation import Speculator
from tests.generate.test_grammar import grammars, tokenizer
from tests.support import points
from tests.support.schemas import CASES, TEXT, WHOLE, closed, items, text

SCHEMAS = [
    closed({"name": text(maxLength=8), "age": {"type": "integer", "minimum": 1, "maximum": 99}}),
    items({"enum": ["to be", "not to be", 7]}, minItems=2, maxItems=4),
    CASES["calls"].schema,
    closed({"date": text(format="date"), "ok": {"type": "boolean"}, "rest": {"anyOf": [TEXT, WHOLE, {"type": "null"}]}}),
]  # fmt: skip
ANSWER = 60  # tokens
ALONE = 24  # requests that are served by themselves, too


def runner(kind: type[Runner] = ModelRunner, pages: int = 400) -> Runner:
    return kind(weights.load(catalog.resolve("bard"), torch.float32), pages, 16)


def requests(n: int, every: int = 2, **sampling: Any) -> list[Sequence]:
    """Return requests, one in `every` of which has a form."""
    made = []
    for i in range(n):
        grammar = None
        if i % every == 0:
            grammar = Constraint(grammars().compile("json", SCHEMAS[i // every % len(SCHEMAS)]))
        params = SamplingParams(**{"temperature": 0.9 if i % 3 else 0.0, "seed": i, "grammar": grammar, **sampling})
        seq = Sequence(tokenizer().encode(f"ROMEO: {i} words"), ANSWER if grammar else 20, id=str(i), sampling=params)
        seq.stop = lambda token: "stop" if token in tokenizer().eos_ids else None
        made.append(seq)
    return made


def serve(
    sequences: list[Sequence], runner: Runner, *, policy: str = "dynamic", slots: int = 64, pages: int = 400,
    speculator: Speculator | None = None,
) -> dict[str, list[int]]:  # fmt: skip
    """Return the tokens by request."""
    pool = PagePool(pages, 16, prefix_cache=True)
    scheduler = Scheduler(policies.get_policy(policy, slots), pool, 256, speculator=speculator)
    clock = iter(range(1 << 30))
    scheduler.policy.margin = 4  # tokens that each has room for when it joins: the rest is preempted for
    for seq in sequences:
        seq.open_ended = True
        scheduler.add(seq)
    while not scheduler.is_idle:
        scheduler.step(runner.forward, lambda: next(clock) / 10)
    assert all(seq.error is None for seq in sequences)
    return {seq.id: seq.output_ids for seq in sequences}


@functools.cache
def alone() -> dict[str, list[int]]:
    """Return the tokens of some requests, each served by itself."""
    own = runner()
    return {seq.id: serve([seq], own)[seq.id] for seq in requests(ALONE)}


def test_every_complete_answer_is_valid() -> None:
    complete = 0
    for seq in requests(ALONE):
        tokens = alone()[seq.id]
        if seq.sampling.grammar is None or tokens[-1] not in tokenizer().eos_ids:
            continue
        complete += 1
        value = json.loads(tokenizer().decode(tokens[:-1]))
        jsonschema.validate(
            value, SCHEMAS[int(seq.id) // 2 % len(SCHEMAS)], format_checker=jsonschema.FormatChecker(["date"])
        )
    assert complete >= 8


def test_texts_are_the_same_among_others() -> None:
    together = serve(requests(64), runner())
    assert {id: together[id] for id in alone()} == alone()


@pytest.mark.parametrize("policy", points(1, "static", "chunked"))
def test_texts_are_the_same_under_other_policies(policy: str) -> None:
    assert serve(requests(ALONE), runner(), policy=policy, slots=8) == alone()


def is_greedy(id: str) -> bool:
    return int(id) % 3 == 0


@pytest.mark.parametrize("kind", [ModelRunner, GpuRunner])
def test_texts_are_the_same_with_drafts_of_which_the_forced_ones_are_right(kind: type[Runner]) -> None:
    sequences = requests(ALONE)
    forced = serve(sequences, runner(kind), speculator=Speculator(ForcedDrafter(NgramDrafter()), 4))
    assert forced == (alone() if kind is ModelRunner else serve(requests(ALONE), runner(kind)))
    assert all(forced[id] == tokens for id, tokens in alone().items() if is_greedy(id))
    accepted = sum(seq.accepted for seq in sequences if seq.sampling.grammar)
    assert accepted > 2 * len(sequences)


def test_texts_are_the_same_after_preemption() -> None:
    sequences = requests(ALONE)
    assert serve(sequences, runner(pages=40), pages=40, slots=32) == alone()
    assert any(seq.preemptions for seq in sequences if seq.sampling.grammar)


def test_greedy_texts_are_the_same_without_the_c_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("generate.sampling._library", lambda: None)
    plain = serve([seq for seq in requests(ALONE) if is_greedy(seq.id)], runner())
    assert plain == {id: tokens for id, tokens in alone().items() if is_greedy(id)}


FILTERS = [{"top_p": 0.8}, {"top_k": 5, "repetition_penalty": 1.3}, {"min_p": 0.05}, {"typical_p": 0.9}, {}]


@pytest.mark.parametrize("kind", [ModelRunner, GpuRunner])
def test_filtered_and_processed_rows_keep_to_the_form(kind: type[Runner]) -> None:
    sequences = [requests(10, 1, **FILTERS[i % 5])[i] for i in range(10)]
    for seq, tokens in zip(sequences, serve(sequences, runner(kind)).values(), strict=True):
        ended = tokens[-1] in tokenizer().eos_ids
        assert seq.sampling.grammar.at(tokens[: len(tokens) - ended]).is_accepting() or not ended


def test_log_probabilities_are_those_of_the_model() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0] * 1024])
    before = logits.clone()
    params = SamplingParams(temperature=0.0, grammar=Constraint(grammars().compile("choice", ["b"])))
    token = Draws([params]).draw(logits, torch.tensor([0]), lambda i: History([], []))[0]
    assert tokenizer().decode([int(token)]) == "b"
    assert logits.equal(before)


def test_neighbors_and_drafts_of_a_row_that_fails_are_as_if_it_were_not_there() -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, tokenizer().vocab_size)
    params = [SamplingParams(seed=i) for i in range(5)]
    plain = sample(logits, params, range(5))
    failing = SamplingParams(seed=2, grammar=Constraint(grammars().compile("regex", "[0-9]+")))
    wrong = History([], tokenizer().encode("x"))
    tokens = Draws([*params[:2], failing, *params[3:]]).draw(logits, torch.arange(5), lambda i: wrong)
    assert isinstance(tokens[2], FormError)
    assert "form cannot go on" in tokens[2].reason
    assert [*tokens[:2], *tokens[3:]] == [*plain[:2], *plain[3:]]


def test_a_mask_of_ones_changes_nothing_and_a_row_that_is_not_finite_is_still_found() -> None:
    torch.manual_seed(2)
    logits = torch.randn(9, tokenizer().vocab_size) * 4
    params = [SamplingParams(temperature=t, seed=i) for i, t in enumerate([0, 0.3, 0.7, 1, 1.5, 2, 5, 50, 1])]
    anything = grammars().compile("lark", "start: /(.|\\n)*/")
    # The text grammar excludes control tokens and halves of characters, so these logits are far below all others.
    excluded = [t for t in range(tokenizer().vocab_size) if not _is_text(t)]
    logits[:, excluded] = -1e9
    bound = [SamplingParams(temperature=p.temperature, seed=p.seed, grammar=Constraint(anything)) for p in params]
    history = History([], [])
    assert [*Draws(bound).draw(logits, torch.arange(9), lambda i: history)] == [*sample(logits, params, range(9))]
    logits[4, 7] = torch.nan
    tokens = Draws(bound).draw(logits, torch.arange(9), lambda i: history)
    assert isinstance(tokens[4], NotFinite)
    assert sum(isinstance(token, NotFinite) for token in tokens) == 1


def _is_text(token: int) -> bool:
    try:
        return bool(tokenizer().token_bytes(token).decode()) and token not in tokenizer().special_ids
    except UnicodeDecodeError:
        return False


def test_min_tokens_does_not_outlast_the_form() -> None:
    (seq,) = requests(1, 1, min_tokens=60, banned_ids=frozenset(tokenizer().eos_ids), temperature=0.0)
    tokens = serve([seq], runner())[seq.id]
    assert tokens[-1] in tokenizer().eos_ids or len(tokens) == ANSWER


def test_steps_say_how_long_they_waited_for_masks() -> None:
    pool = PagePool(100, 16)
    scheduler = Scheduler(policies.get_policy("dynamic", 4), pool, 256)
    own = runner()
    for seq in requests(2, 2):
        scheduler.add(seq)
    clock = iter(range(1 << 30))
    record = scheduler.step(own.forward, lambda: next(clock) / 10)
    assert record is not None
    assert 0 < record.mask_seconds < 5
