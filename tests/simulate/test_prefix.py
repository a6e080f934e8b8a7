"""Prefix caches against the figures of the Mooncake trace and of llm-mock's experiment."""

from __future__ import annotations

import numpy as np
import pytest

import policies
from client.workloads import traces
from costs import published
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate import prefix
from simulate.prefix import Trie
from simulate.simulator import simulate
from tests.support.data import path_of


def test_the_trace_has_its_blocks() -> None:
    rows = traces.read(path_of("mooncake_conversation_2000.jsonl")).rows
    assert sum(len(row.blocks) for row in rows) == 44_833
    assert len({block for row in rows for block in row.blocks}) == 31_766


def test_a_trie_keeps_the_most_visited_edges_and_of_equals_the_smaller() -> None:
    asked = [[1, 2, 3], [1, 2, 4], [5, 6], [1, 9]]
    assert Trie(asked, 2).root == {1: {2: {}}}
    assert Trie(asked, 3).root == {1: {2: {3: {}}}}
    assert Trie(asked, 0).serve([1, 2]) == 0
    assert [Trie(asked, 100).serve(p) for p in ([1, 2, 4, 7], [5, 6], [2])] == [3, 2, 0]
    assert Trie(asked, 100).edges == 7


def test_prompts_that_share_nothing_gain_nothing_and_those_that_share_do() -> None:
    cost = published.make("llm-mock")
    alone = prefix.experiment(cost, sizes=(0, 5000), batches=(10,), train=600)
    shared = prefix.experiment(cost, sizes=(0, 5000), batches=(10,), share=200, train=600)
    assert alone[0]["hit_tokens"] == 0
    assert alone[1]["hit_tokens"] < 5
    assert alone[1]["p99_ttft_s"] == pytest.approx(alone[0]["p99_ttft_s"], rel=0.1)
    assert shared[1]["hit_tokens"] >= 195
    assert shared[1]["p99_ttft_s"] < 0.8 * shared[0]["p99_ttft_s"]


def test_a_live_cache_needs_to_have_seen_the_prompt_lately_and_lpm_makes_the_most_of_it() -> None:
    cost = published.make("llm-mock")
    alone = prefix.experiment(cost, (0, 5000), (10,), train=600, kinds=("live",))
    assert [row["hit_tokens"] for row in alone] == [0, 0]
    rows = prefix.experiment(cost, (640, 5000), (10,), share=200, train=600, kinds=prefix.KINDS)
    found = {(row["kind"], row["cache"]): row for row in rows}
    # 200 tokens are 12 pages of 16, and a rest that no page holds; the trie holds single tokens.
    assert 170 < found["live", 5000]["hit_tokens"] <= 192 < found["trie", 5000]["hit_tokens"]
    assert found["live+lpm", 640]["hit_tokens"] > found["live", 640]["hit_tokens"]
    assert found["live+lpm", 640]["p99_ttft_s"] < found["live", 640]["p99_ttft_s"]


def test_a_live_cache_keeps_so_many_pages_and_those_that_were_used_last() -> None:
    pool = prefix.LivePool(10, 3)
    old, young = list(range(33)), list(range(100, 133))
    pool.warm([old, young])
    assert (pool.cached, pool.used) == (3, 0)
    assert [pool.cached_tokens(pool.hashes(prompt)) for prompt in (old, young)] == [16, 32]


def test_that_larger_batches_waste_more_belongs_to_the_padded_cost() -> None:
    """llm-mock charges rows x longest x widest; with a ragged cost the larger batch is the faster one."""

    def rates(model: str) -> list[float]:
        rows = prefix.experiment(published.make(model), sizes=(0,), batches=(1, 10, 20))
        return [row["requests_per_s"] for row in rows]

    padded, ragged = rates("llm-mock"), rates("llm-mock-ragged")
    assert padded[2] < padded[1]
    assert ragged[2] > ragged[1] > ragged[0]


def expected_misses(kinds: int, requests: int) -> float:
    """Return how many of `kinds` system prompts are computed when requests draw them evenly: K (1 - (1 - 1/K)^N)."""
    return kinds * (1 - (1 - 1 / kinds) ** requests)


def test_shared_system_prompts_are_missed_as_often_as_expected() -> None:
    assert expected_misses(10, 50) == pytest.approx(9.9485, abs=5e-5)
    misses = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        scheduler = Scheduler(policies.get_policy("nobatch"), PagePool(2000, 16))
        trace = [
            Sequence([100 + int(rng.integers(10))] * 64 + [i] * 16, 2, id=str(i), arrived_at=float(i))
            for i in range(20)
        ]
        run = simulate(scheduler, trace, published.make("constant"))
        misses.append(sum(seq.cached == 0 for seq in run.sequences))
    assert np.mean(misses) == pytest.approx(expected_misses(10, 20), rel=0.05)


def test_a_full_hit_still_computes_a_token() -> None:
    prompt = list(range(30))
    run = prefix.serve(published.make("llm-mock"), [prompt] * 2, 1, Trie([prompt], 100))
    assert [seq.cached for seq in run.sequences] == [29, 29]
    assert (run.tokens == 57).all()
