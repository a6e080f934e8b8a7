"""The recordings that /race opens with, and the picture in the README is made of: what they show is so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import ROOT

POLICIES = ("nobatch", "static", "dynamic")


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[dict[str, Any]]]:
    return {
        policy: [json.loads(line) for line in (ROOT / "web" / "demo" / f"{policy}.jsonl").read_text().splitlines()]
        for policy in POLICIES
    }


def ends(lines: list[dict[str, Any]]) -> list[float]:
    """Return when each request was answered."""
    return sorted(line["t"] + line["seconds"] for line in lines if "members" in line for _ in line["left"])


def test_the_recorded_servers_got_the_same_requests_in_the_same_order(recorded: dict[str, Any]) -> None:
    came = {
        policy: [(line["id"], line["max_tokens"]) for line in sorted(lines, key=lambda line: line.get("t", 0))
                 if "max_tokens" in line]
        for policy, lines in recorded.items()
    }  # fmt: skip
    assert len(came["dynamic"]) > 20
    assert came["nobatch"] == came["static"] == came["dynamic"]


@pytest.mark.parametrize("whole", POLICIES)
def test_dynamic_has_answered_at_least_as_many_at_every_tenth(recorded: dict[str, Any], whole: str) -> None:
    times = {policy: ends(lines) for policy, lines in recorded.items()}
    for tenth in range(1, 11):
        at = times[whole][-1] * tenth / 10
        answered = {policy: sum(end <= at for end in each) for policy, each in times.items()}
        assert answered["dynamic"] == max(answered.values()), (at, answered)
