"""Recorded runs that this project's scheduler decides again: of vLLM, which planned ahead, and of a stand-in of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines import replay
from tests.engines.small_vllm import Status, request, small_vllm
from tests.support import ROOT

ASYNCHRONOUS = ROOT / "tests/data/vllm_record.jsonl"  # of vLLM 0.32.0's AsyncScheduler, with an abort
SAME = "Decided again: 100.00% of the steps and 100.00% of the joins are equal"


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_what_vllm_planned_ahead_is_decided_alike() -> None:
    words = replay.Replay(lines_of(ASYNCHRONOUS)).run()
    assert words.startswith("11 steps of dynamic+sjf")
    assert words.endswith(SAME)


def test_the_first_difference_is_named() -> None:
    lines = lines_of(ASYNCHRONOUS)
    lines[0] |= {"policy": "dynamic"}
    assert "first in step 8: joined ['r2'] here, ['r4'] in vLLM" in replay.Replay(lines).run()


@pytest.mark.parametrize("policy", ["dynamic", "dynamic+sjf", "static", "nobatch", "chunked"])
@pytest.mark.parametrize("blocks", [100, 9])
def test_each_policy_decides_alike_outside_of_the_engine(
    policy: str, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_vllm() as adapter:
        settings = {"policy": policy, "record": str(tmp_path / "record")}
        monkeypatch.setenv(adapter.SETTINGS, json.dumps(settings))
        scheduler = adapter.PolicyScheduler(slots=3, tokens=12, blocks=blocks)
        for i in range(9):
            scheduler.add_request(request(f"r{i}", prompt=3 + i % 4, tokens=1 + i % 3))
            scheduler.update_from_output(scheduler.schedule(), None)
            if i == 6:
                scheduler.finish_requests("r5", Status.FINISHED_ABORTED)
        while scheduler.requests:
            scheduler.update_from_output(scheduler.schedule(), None)
    assert replay.Replay(lines_of(tmp_path / "record")).run().endswith(SAME)


@pytest.mark.parametrize(("line", "code"), [([], 2), (["--help"], 0)])
def test_without_a_record_it_says_how_it_is_used(
    line: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        replay.main(line)
    assert done.value.code == code
    assert "RECORD" in "".join(capsys.readouterr())


@pytest.mark.parametrize("text", ["", "1", '{"n": 1}', "no"])
def test_a_file_that_is_no_record_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_text(text, "utf-8")
    with pytest.raises(SystemExit, match=r"--record"):
        replay.main([str(path)])
