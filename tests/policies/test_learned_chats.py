"""What learned lengths bring on a real model's chats, and what they cost when prompts change their meaning."""

from __future__ import annotations

import json

import learned_chats as learned
import pytest


@pytest.mark.full
@pytest.mark.parametrize(
    ("drift", "least_gain"), [("none", 0.5), ("middle", 0.3), ("hundreds", -1.0), ("no pattern", -1.0)]
)
def test_learned_lengths_gain_half_of_what_the_truth_does_and_lose_little_when_they_are_wrong(
    drift: str, least_gain: float
) -> None:
    known = json.loads(learned.LENGTHS.read_text())
    chats = known["lengths"], known["limit"], 972
    rate = 0.9 * learned.capacity(*chats)
    found = learned.summary([
        learned.compare("dynamic+sjf", lambda: learned.requests(*chats, rate, seed, drift))  # noqa: B023
        for seed in (100, 101)
    ])  # fmt: skip
    assert found["gain"] > least_gain
    assert found["worst"] < 0.02
