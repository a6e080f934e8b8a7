"""The autoscalers keep their laws, want what they say, and the laws notice autoscalers that do not."""

from __future__ import annotations

from random import Random

import pytest
from autoscaler_laws import broken_law

from routing.autoscalers import AUTOSCALERS, Autoscaler, Bounds, Load, Patience, make

CASES = 40
BOUNDS = Bounds(2, 8)
STEADY = {"fixed", "tokens"}  # whose number settles under a constant load; `requests` may alternate between two


@pytest.mark.parametrize("text", [*AUTOSCALERS, "fixed:0.5", "requests:8", "tokens:0.4", "tokens:0.95"])
def test_every_autoscaler_keeps_every_law(text: str) -> None:
    steady = text.partition(":")[0] in STEADY
    assert {broken_law(make(text), seed, steady=steady) for seed in range(CASES)} == {None}


def test_counting_requests_alternates_between_two_numbers() -> None:
    found = {broken_law(make("requests:8"), seed) for seed in range(CASES)} - {None}
    assert found
    assert all(str(broken).startswith("no flapping") for broken in found)


def to_and_fro(replicas: list[Load], bounds: Bounds) -> int:
    """Fill the bounds, then start from the least again."""
    return bounds.least if len(replicas) == bounds.most else bounds.most


FAULTY: dict[str, tuple[Autoscaler, str]] = {
    "any number": (lambda replicas, bounds: len(replicas) + 1, "within the bounds"),
    "a fraction": (lambda replicas, bounds: bounds.least + 0.0, "within the bounds"),  # type: ignore[dict-item,return-value]
    "the least": (lambda replicas, bounds: bounds.least, "room for running requests"),
    "draws lots": (lambda replicas, bounds: Random().randint(bounds.least, bounds.most), "purity"),
    "to and fro": (to_and_fro, "no flapping under a constant load"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_planted_fault_is_caught(name: str) -> None:
    wanted, law = FAULTY[name]
    found = {broken_law(wanted, seed) for seed in range(CASES)} - {None}
    assert any(str(broken).startswith(law) for broken in found)


def test_requests_counts_requests_whatever_their_length() -> None:
    replicas = [Load(running=3, waiting=2, kv_used=0.1), Load(running=1)]
    assert make("requests")(replicas, BOUNDS) == 3
    assert make("requests:6")(replicas, BOUNDS) == 2


def test_tokens_wants_room_for_what_runs_and_waits() -> None:
    full = Load(running=4, waiting=1, slots=32, kv_used=0.9, kv_tokens=10_000, waiting_tokens=5_000)
    assert make("tokens")([full, full], BOUNDS) == 4  # 2 x (0.9 + 0.5) / 0.7
    assert make("tokens:0.5")([full, full], BOUNDS) == 6


def test_tokens_wants_more_for_few_long_requests_than_for_many_short_ones() -> None:
    long = [Load(running=2, slots=32, kv_used=0.95, kv_tokens=65_536)] * 2
    short = [Load(running=14, slots=32, kv_used=0.05, kv_tokens=65_536)] * 2
    assert make("tokens")(long, BOUNDS) == 3
    assert make("requests:8")(long, BOUNDS) == 2
    assert make("tokens")(short, BOUNDS) == 2
    assert make("requests:8")(short, BOUNDS) == 4


def test_tokens_wants_more_when_prompts_pile_up_in_slots() -> None:
    assert make("tokens")([Load(running=2, slots=32, prefill_tokens=12_000)] * 2, BOUNDS) == 6


def test_starting_replicas_count_so_that_no_more_are_wanted_meanwhile() -> None:
    busy, starting = Load(running=32, slots=32), Load(slots=32)
    assert make("tokens")([busy] * 3, BOUNDS) == 5
    assert make("tokens")([busy] * 3 + [starting] * 2, BOUNDS) == 5


@pytest.mark.parametrize("text", ["token", "tokens:2", "tokens:", "requests:0", "fixed:nan", "requests:inf"])
def test_a_mistake_in_the_name_or_target_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="Use "):
        make(text)


def test_patience_lets_the_number_change_after_its_delay_without_a_break() -> None:
    patience = Patience(up=10, down=60)
    decided = [patience.decide(2, wanted, at) for at, wanted in [(0, 4), (5, 2), (9, 4), (18, 4), (19, 5)]]
    assert decided == [2, 2, 2, 2, 5]
    assert [patience.decide(5, 3, at) for at in (20, 79, 80)] == [5, 5, 3]
