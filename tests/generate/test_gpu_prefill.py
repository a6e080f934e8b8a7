"""Pieces of prompts are computed in a bucket that holds them, or as they are, with the same texts."""

from __future__ import annotations

import pytest
from test_gpu_runner import CONFIG, gpu_runner

from generate.gpu import prefill
from generate.params import GREEDY
from scheduling.iteration import Plan
from scheduling.sequence import Sequence
from tests.support.generate import make_model, ragged, run


def test_a_step_runs_in_the_smallest_bucket_that_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = gpu_runner()
    sizes: list[int] = []
    replay = runner.prefill.replayer.run
    monkeypatch.setattr(runner.prefill.replayer, "run", lambda size: (sizes.append(size), replay(size))[1])
    for tokens in (16, 17, 200):
        runner.forward(Plan(1, 0.0, [Sequence([1] * tokens, 1, sampling=GREEDY, pages=[1, 2, 3, 4])], [tokens]))
    assert sizes == [16, 32, 256]
    short = [Sequence([1], 1, sampling=GREEDY, pages=[1 + i]) for i in range(6)]
    monkeypatch.setattr(prefill, "SHORT", 5)
    runner.forward(Plan(1, 0.0, short, [1] * 6))
    assert sizes == [16, 32, 256]  # it was launched as it is


@pytest.mark.parametrize(("buckets", "short"), [((16, 32), 128), ((512,), 128), ((64, 512), 2)])
def test_buckets_change_no_text(buckets: tuple[int, ...], short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(make_model(CONFIG), ragged(CONFIG, 12, 3), budget=90)
    monkeypatch.setattr(prefill, "BUCKETS", buckets)
    monkeypatch.setattr(prefill, "SHORT", short)
    assert run(None, ragged(CONFIG, 12, 3), budget=90, runner=gpu_runner()) == expected


@pytest.mark.parametrize("counts", [[1] * 128, [65, 63, 1, 127], [2048], [1] * 127 + [1921], [17] * 120])
def test_a_bucket_has_tiles_for_any_pieces_unless_too_many_are_short(counts: list[int]) -> None:
    tiles, _ = prefill.cut([0] * len(counts), counts, [[1]] * len(counts), 1 << 12)
    assert len(tiles) <= 4 * prefill._tiles_of(sum(counts))
