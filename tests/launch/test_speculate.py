"""Settings for drafts that cannot work are refused with the value and the remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from config import Config, ConfigError
from launch import load_drafter, preflight
from models.sources import catalog
from models.text.tokenizer import load_tokenizer


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        preflight.check_drafts(Config(**{"policy": "dynamic", **settings}))
    return str(caught.value)


def test_a_draft_model_and_the_mode_must_fit_each_other() -> None:
    assert "--speculate off uses none" in refusal(draft_model="gpt2", speculate="off")
    assert "--speculate model" in refusal(draft_model="gpt2", speculate="ngram")
    assert "--draft-model" in refusal(speculate="model")
    assert "mock:llm-mock" in refusal(speculate="model", draft_model="gpt2", model="mock:llm-mock")
    preflight.check_drafts(Config(policy="dynamic", speculate="model", draft_model="gpt2"))
    preflight.check_drafts(Config(policy="static"))


def test_a_padded_policy_has_no_room_for_drafts() -> None:
    assert "static" in refusal(policy="static", speculate="ngram")


def parts(tokenizer: Any) -> Any:
    return SimpleNamespace(
        model=None, tokenizer=tokenizer, model_name="served", dtype="float32", device="cpu", context=128, n_pages=9
    )


def test_a_draft_model_of_other_tokens_is_refused() -> None:
    tokenizer = load_tokenizer(catalog.resolve("bard"))
    pieces = [*tokenizer.vocabulary.pieces[:7], b"other", *tokenizer.vocabulary.pieces[8:]]
    other = SimpleNamespace(vocabulary=SimpleNamespace(pieces=pieces))
    config = Config(policy="dynamic", speculate="model", draft_model="bard")
    with pytest.raises(ConfigError, match=r"from\s+token 7 on"):
        load_drafter.make_speculator(config, parts(other))


def test_a_draft_model_of_the_same_tokens_is_loaded_with_pages_of_its_own() -> None:
    config = Config(policy="dynamic", speculate="auto", draft_model="bard", max_batch_size=2)
    speculator = load_drafter.make_speculator(config, parts(load_tokenizer(catalog.resolve("bard"))))
    assert speculator is not None
    assert (
        speculator.drafter.drafter.other.pool.free == 4 - 1
    )  # two slots of 128 tokens in pages of 64, one for padding


def test_draft_tokens_are_the_default_where_they_cost_nothing() -> None:
    def has_drafts(device: str = "cpu", **settings: Any) -> bool:
        config = Config(**{"policy": "dynamic", "model": "bard", **settings})
        return load_drafter.make_speculator(config, SimpleNamespace(model=None, device=device)) is not None

    assert has_drafts()
    assert not has_drafts(speculate="off")
    assert not has_drafts(drafts="0")
    assert not has_drafts(policy="static")
    assert not has_drafts("cuda:0")
    assert has_drafts("cuda:0", speculate="ngram")
