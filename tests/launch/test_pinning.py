"""A prefix cache that holds the most common beginnings of a ShareGPT file from the start, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from client.workloads.corpus import plays
from config import Config, ConfigError
from launch.engine import load_engine

HEAD = plays().at(0, 200)
PROMPTS = [f"{HEAD} {plays().at(100 + i, 20)}" for i in range(4)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file whose questions share 200 tokens, three pages of bard and twelve of a mock model."""
    asked = [f"{HEAD} {plays().at(50 + i, 90)}" for i in range(3)]
    said = [[{"from": "human", "value": text}, {"from": "gpt", "value": "aye"}] for text in asked]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"conversations": each} for each in said]))
    return path


def served(model: str, **settings: Any) -> tuple[list[list[int]], list[int]]:
    """Return the answers to PROMPTS, one after another, and how many tokens each found in the cache."""
    engine = load_engine(Config(policy="dynamic", model=model, max_batch_size=4, kv_memory=256 << 20, **settings))
    answers = []
    try:
        for prompt in PROMPTS:
            inference = engine.make_inference(prompt, 8, seed=1)
            engine.manager.enqueue(inference)
            inference.wait_for_completion()
            answers.append(inference.sequence)
    finally:
        engine.manager.stop()
    return [seq.output_ids for seq in answers], [seq.cached for seq in answers]


def test_pinned_pages_are_found_from_the_first_request_on_and_change_no_answer(file: Path) -> None:
    plain, found = served("bard")
    assert found[0] == 0
    # A step of 64 tokens computes one page, so the chain of three is computed in three.
    settings = {"pinned_pages": 8, "max_tokens_per_step": 64}
    assert served("bard", pinned_prefixes=str(file), **settings) == (plain, [192] * 4)


def test_a_mock_model_has_them_too_and_no_more_than_may_be_pinned(file: Path) -> None:
    for settings, cached in (({}, 192), ({"pinned_pages": 8}, 128)):
        assert served("mock:llm-mock@1000", pinned_prefixes=str(file), **settings)[1] == [cached] * 4


def test_settings_that_contradict_pinned_pages_are_refused(file: Path) -> None:
    for settings in ({"evict": "ttl"}, {"prefix_cache": False}):
        with pytest.raises(ConfigError, match="Leave out --evict"):
            Config(pinned_prefixes=str(file), **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sharegpt\.json.* Use another ShareGPT file"):
        served("mock:llm-mock", pinned_prefixes=f"{file}/sharegpt.json")
