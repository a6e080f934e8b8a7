"""Speculative decoding in the client: the figures of a server with draft tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from client.report import plots_requests, store, summary
from client.report.album import Album
from simulate.__main__ import main


def readings(before: int, drafted: int, accepted: int) -> dict[str, Any]:
    def stats(tokens: int, right: int) -> dict[str, Any]:
        return {"engine": {"drafts": {"times": 1, "tokens": tokens, "accepted": right}}}

    return {
        "total_output_tokens": 110, "completed": 10,
        "server_before": stats(before, before), "server_after": stats(before + drafted, before + accepted),
    }  # fmt: skip


def test_acceptance_and_tokens_per_step_are_those_between_two_readings() -> None:
    assert store.speculation(readings(500, 80, 20)) == {"acceptance": 0.25, "tokens_per_step": 100 / 80}
    assert store.speculation(readings(500, 0, 0)) == {}
    assert store.speculation({"total_output_tokens": 9, "completed": 1}) == {}


@pytest.mark.parametrize("more", [["--acceptance", "0.8"], []])
def test_a_comparison_has_what_speculation_did_where_there_was_some(more: list[str], tmp_path: Path) -> None:
    words = ["run", "dynamic", "chunked", "--num", "40", "--cost", "splitwise", "--no-plots", *more]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    album = Album(store.read(tmp_path / "run"), [])
    assert ("tokens per step" in summary.markdown(album.results)) == bool(more)
    plots_requests.latency_cdf(album)
    for name in [picture.name for picture in album.pictures]:
        assert (tmp_path / "run" / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in (tmp_path / "run" / "plots" / f"{name}.svg").read_text()
