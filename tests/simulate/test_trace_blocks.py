"""Prompts that a trace gives as block numbers share pages where their blocks are equal, in every command."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

import policies
from costs import published
from routing.routers import ROUTERS
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from simulate import workloads
from simulate.fleet.fleet import Fleet
from simulate.rows import Rows
from simulate.simulator import simulate
from tests.support.simulate import run_command

COST = published.make("affine")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats of three turns, each of which begins with all blocks of the one before."""
    rows = []
    for chat in range(12):
        for turn in range(3):
            ids = [0, *range(100 * chat + 1, 100 * chat + 2 + turn)]
            length = 512 * len(ids) + 40 * turn
            rows.append(
                {"timestamp": 1000 * (chat + 5 * turn), "input_length": length, "output_length": 30, "hash_ids": ids}
            )
    path = tmp_path_factory.mktemp("blocks") / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def scheduler(page_size: int, tokens: int = 32_768) -> Scheduler:
    pool = PagePool(tokens // page_size + 1, page_size)
    return Scheduler(policies.get_policy("dynamic", max_batch_size=8, options={"reserve": "prompt"}), pool)


def cached(rows: Rows, size: int) -> list[int]:
    """Return the prompt tokens of each request that are found in pages of this size."""
    run = simulate(scheduler(size), replace(rows, page_size=size).sequences(), COST)
    return [seq.cached for seq in run.sequences]


def test_pages_of_the_size_of_a_block_are_found_as_smaller_ones_are(trace: Path) -> None:
    rows = workloads.read(trace)
    small, large = cached(rows, 16), cached(rows, 512)
    assert sum(large) > 20_000
    assert [tokens // 512 * 512 for tokens in small] == large


def test_a_trace_may_have_blocks_of_another_size(trace: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    short = [line | {"block_size": 16, "input_length": 16 * len(line["hash_ids"])} for line in lines]
    (tmp_path / "short.jsonl").write_text("\n".join(map(json.dumps, short)))
    rows = workloads.read(tmp_path / "short.jsonl")
    small, large = cached(rows, 4), cached(rows, 16)
    assert sum(large) > 600
    assert small == large
    (tmp_path / "short.jsonl").write_text("\n".join(map(json.dumps, [*short, lines[-1]])))
    with pytest.raises(ValueError, match=r"16, 512"):
        workloads.read(tmp_path / "short.jsonl")


def test_equal_blocks_are_equal_tokens_and_all_others_differ(trace: Path) -> None:
    rows = workloads.read(trace)
    first, later = rows.sequences()[0].prompt_ids, next(s for s in rows.sequences() if s.arrived_at == 5.0).prompt_ids
    assert first[:1024] == later[:1024]
    ends = [tuple(seq.prompt_ids[-10:]) for seq in rows.sequences() if len(seq.prompt_ids) % 512]
    assert len(set(ends)) == len(ends)


@pytest.mark.parametrize("router", ["round-robin", "prefix-aware"])
def test_a_fleet_of_one_finds_what_the_simulator_finds(trace: Path, router: str) -> None:
    """Also where requests grow beyond their pages and are preempted."""
    rows = replace(workloads.read(trace).faster(4), page_size=512)
    run = simulate(scheduler(512, 5_120), rows.sequences(), COST, fast_forward=False)
    one = Fleet([scheduler(512, 5_120)], COST).run(rows.arriving(), ROUTERS[router](random.Random(1)))
    assert (one.latency == run.latency).all()
    assert (one.ttft == run.ttft).all()
    assert one.steps == run.steps
    assert one.hit_rate == sum(s.cached for s in run.sequences) / sum(len(s.prompt_ids) for s in run.sequences)


def test_prefixes_are_found_in_every_command(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--trace", str(trace), "--kv-tokens", "32768", "--page-size", "512", "--cost", "affine", "--seed", "1"]
    run, _ = run_command(capsys, "run", "dynamic", *base[:-2])
    assert run["simulation"]["steps"] > 0
    fleet, words = run_command(capsys, "fleet", "dynamic", *base, "--replicas", "3", "--router", "prefix-aware")
    assert fleet["routers"][0]["hit_rate"] > 0.3
    assert "cache hits" in words
