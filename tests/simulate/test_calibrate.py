"""The fit of a cost model to timings: laws recovered from noisy ones, errors that are honest, files that are read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costs import cost as costs
from costs.cost import Affine, Cost, Host
from costs.steps import decoding, step_of_members
from scheduling.iteration import Member
from simulate.__main__ import main
from simulate.measured import calibrate, intervals
from simulate.measured.calibrate import Measure, Point, choose, cross_validate, fit, grid, predict
from simulate.measured.least_squares import TERMS, terms_of
from simulate.measured.recorded import cost_of

LAW = Affine(base=0.09, prefill=0.004, token=0.005, row=0.0006, context=6e-6, pair=2e-6)


def noisy(law: Cost, noise: float = 0.02, seed: int = 0) -> Measure:
    rng = np.random.default_rng(seed)

    def measure(points: Sequence[Point]) -> Iterator[float]:
        for point in points:
            yield law.seconds(point.step) * (1 + noise * rng.standard_normal())

    return measure


@pytest.mark.parametrize("size", ["small", "full"])
@pytest.mark.parametrize("seed", range(5))
def test_a_law_is_recovered_from_timings_with_noise(size: str, seed: int) -> None:
    """2 % of noise: within 1 % of the law, and what carries half of some step within 10 %, none below 0."""
    points = grid(size, 1024)
    found, _ = calibrate.calibrate(noisy(LAW, seed=seed), points)
    steps = [point.step for point in points]
    truth = predict(LAW, steps)
    assert np.abs(predict(found.cost, steps) / truth - 1).mean() < 0.01
    assert isinstance(found.cost, Affine)
    shares = np.array([terms_of(step) for step in steps]) * [getattr(LAW, name) for name in TERMS]
    carries = (shares / truth[:, None]).max(axis=0) >= 0.5
    for name, share in zip(TERMS, carries):
        value = getattr(found.cost, name)
        assert value >= 0
        if share:
            assert value == pytest.approx(getattr(LAW, name), rel=0.1), name
    assert found.mape < 0.03
    assert found.drift < calibrate.DRIFT


@pytest.mark.parametrize("size", ["small", "full"])
@pytest.mark.parametrize("context", [256, 1024, 8192])
def test_the_longest_sequences_are_timed_and_none_exceeds_the_context(size: str, context: int) -> None:
    longest = max(max(point.context, point.cached + point.chunk) for point in grid(size, 256, context))
    assert context / 2 <= longest < context
    assert longest > 8000 or context < 8192
    tokens = [point.decodes * point.context for point in grid(size, 256, context)]
    assert max(tokens) <= 128 * 960


def test_what_a_mask_takes_is_found_beside_rows_without_one() -> None:
    points = grid()
    for law in (Affine(0.09, token=0.005, mask_row_s=0.002), Affine(0.09, token=0.005)):
        found, rows = calibrate.calibrate(noisy(law, 0.001), points)
        assert found.cost.mask_row_s == pytest.approx(law.mask_row_s, rel=0.1, abs=1e-4)
        assert [row["masks"] for row in rows] == [point.masks for point in points]


PLAIN = {"base": 0.01, "decode": 2e-5, "prompt": 1e-5, "context": 1e-8}
SWITCHES = [
    {"hinge": 5e-5, "knee": 128},
    {"experts": 0.02, "chosen": 1 / 16},
    {"experts": 0.02, "chosen": 1 / 4, "hinge": 5e-5, "knee": 128},
    *({"decode": 2e-4, "buckets": buckets} for buckets in calibrate.BUCKETS),
]


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda switches: "-".join(switches))
def test_a_hinge_and_experts_and_buckets_are_found_where_they_are(switches: dict[str, Any]) -> None:
    law = Affine(**{**PLAIN, **switches})
    found = calibrate.calibrate(noisy(law, 0.005), grid("full", 1024))[0].cost
    assert (found.knee, found.chosen, found.buckets) == (law.knee, law.chosen, law.buckets)
    assert (found.hinge, found.experts) == pytest.approx((law.hinge, law.experts), rel=0.1)


@pytest.mark.parametrize("size", ["small", "full"])
@pytest.mark.parametrize("law", [LAW, Affine(**PLAIN)], ids=["cpu", "gpu"])
def test_noise_alone_is_no_reason_for_a_hinge_or_experts_or_buckets(law: Affine, size: str) -> None:
    for seed in (9, 14, 22):
        found = calibrate.calibrate(noisy(law, 0.03, seed), grid(size, 1024))[0].cost
        assert (found.hinge, found.experts, found.buckets) == (0, 0, ())


def test_a_machine_that_drifts_is_noticed() -> None:
    def measure(points: Sequence[Point]) -> Iterator[float]:
        for i, point in enumerate(points):
            yield LAW.seconds(point.step) * (1.3 if i >= len(points) // 2 else 1.0)

    assert calibrate.calibrate(measure, grid())[0].drift > calibrate.DRIFT


def test_the_error_is_that_of_points_not_seen() -> None:
    steps = [Point(b, 16).step for b in (1, 2, 4, 8)]
    seconds = np.array([1.0, 2.0, 3.0, 10.0])
    assert (
        np.abs(cross_validate(steps, seconds, folds=0)).mean()
        > np.abs(predict(fit(steps, seconds), steps) / seconds - 1).mean()
    )
    assert choose(steps, seconds).worst >= choose(steps, seconds).mape


def test_the_small_grid_has_all_kinds_of_steps_and_none_beyond_its_bound() -> None:
    points = grid("small", 256)
    assert {(p.decodes > 0, p.prefills > 0) for p in points} == {(True, False), (False, True), (True, True)}
    assert any(p.cached for p in points)
    assert all(replace(p, masks=0) in points for p in points if p.masks)  # what a mask adds is the difference
    assert any(p.masks for p in points)
    assert max(p.prefills * p.chunk for p in points) <= 256
    assert len(points) == len(set(points)) < 50


def test_the_file_of_a_calibration_is_a_cost_model(tmp_path: Path) -> None:
    found, rows = calibrate.calibrate(noisy(LAW), grid())
    path = tmp_path / "cost.json"
    calibrate.write(path, found, rows, Host(sigma=0.001), {"model": "none"})
    law, host, facts = costs.load(path)
    assert (law, host) == (found.cost, Host(sigma=0.001))
    assert facts["mape"] == found.mape
    assert len(facts["points"]) == len(grid())
    json.dumps(facts, allow_nan=False)


def test_the_engine_is_timed_with_constrained_rows() -> None:
    measure = calibrate.probe(["--model", "bard", "--context", "128", "--steps", "60"], {})  # answers begin again
    free, constrained = measure([Point(4, 16), Point(4, 16, masks=3)])
    assert free > 0
    assert constrained > 0


@pytest.mark.parametrize(
    ("flag", "error", "words"),
    [("--no-such-flag", RuntimeError, "Use --model and --load-format"), ("--model=nope", ValueError, r"nope.*Use one of gpt2")],
)  # fmt: skip
def test_an_engine_that_cannot_start_is_an_error_with_its_remedy(flag: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        list(calibrate.probe([flag], {})(grid()))


@pytest.mark.parametrize("share", [3 / 20, 1 / 2])
def test_the_share_of_experts_that_a_model_tells_is_the_one_of_the_law(share: float) -> None:
    law, facts = replace(LAW, experts=0.2, chosen=share), dict[str, Any]()

    def measure(points: Sequence[Point]) -> Iterator[float]:
        facts["chosen"] = share
        yield from noisy(law)(points)

    found, _ = calibrate.calibrate(measure, grid(), facts)
    assert found.cost.chosen == share
    assert found.cost.experts == pytest.approx(0.2, rel=0.2)


def vllm_record(path: Path, overlaps: bool, steps: int = 200) -> None:
    """Write a record of decode steps of one to four rows and prompts of two chunks, by LAW, with 0.001 s between two steps."""
    lines: list[dict[str, Any]] = [{"slots": 4, "tokens": 64, "pages": 10, "page_size": 16}]
    ended, begun = 1.8e9, 1.8e9
    for n in range(steps):
        rows = 1 + n * 7 % 4
        members = [Member(f"r{i}", i, "decode", 1, 40 + n, 300) for i in range(rows)]
        members += [Member("p", 4, "prefill", 10 + n % 50, 60 + n % 50, 300)] * (n % 3 == 0)
        begins, seconds = ended + 0.001, LAW.seconds(step_of_members(members, False))
        planned, begun, ended = (begun if overlaps and n else begins), begins, begins + seconds
        rows_of = [member._asdict() for member in members]
        lines.append({"n": n, "t": planned, "seconds": ended - planned, "members": rows_of, "left": []})
    path.write_text("\n".join([*map(json.dumps, lines), '{"n": 3, "mem']))  # it still grows


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_law_of_a_recorded_vllm_is_recovered_also_where_steps_overlap(overlaps: bool, tmp_path: Path) -> None:
    vllm_record(tmp_path / "record", overlaps)
    assert main(f"calibrate --record {tmp_path / 'record'} --out {tmp_path / 'cost.json'}".split()) == 0
    law, host, facts = costs.load(tmp_path / "cost.json")
    for rows in (1, 4):  # where steps overlap, the time between two is not known from that of a step
        step, between = decoding(rows, 100 * rows), 0.001 * overlaps
        assert law.seconds(step) == pytest.approx(LAW.seconds(step) + between, rel=0.01)
    assert (host.sigma, bool(host.late)) == (pytest.approx(0.0 if overlaps else 0.001, abs=1e-5), overlaps)
    assert facts["machine"] == {"max_batch_size": 4, "max_tokens_per_step": 64, "kv_tokens": 160}
    assert len(list(intervals.of_cost(str(tmp_path / "cost.json")).laws(law, 2))) == 2  # type: ignore[union-attr]


def test_what_is_too_short_or_beside_other_options_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vllm_record(tmp_path / "record", False, steps=29)
    refusals = {"": "at least 30", " --steps 3": "no effect with --record", f" --out {tmp_path / 'record'}": "lost"}
    for more, words in refusals.items():
        assert main(f"calibrate --record {tmp_path / 'record'}{more}".split()) != 0
        assert words in capsys.readouterr().err


def test_the_steps_of_a_reversed_record_are_read_in_the_order_of_their_times(tmp_path: Path) -> None:
    vllm_record(tmp_path / "record", False)
    expected = cost_of(tmp_path / "record")
    head, *lines = (tmp_path / "record").read_text().splitlines()[:-1]
    (tmp_path / "reversed").write_text("\n".join([head, *reversed(lines), ""]))
    assert cost_of(tmp_path / "reversed") == expected


@pytest.mark.parametrize(("old", "new"), [
    ('"seconds": 0', '"seconds": NaN'), ('"seconds": 0', '"seconds": 1' + 400 * "0"), ('"tokens": 1,', '"tokens": 1.5,'),
    ('"slots": 4', '"slots": 0'), ('"page_size": 16', '"page_size": "x"'),
])  # fmt: skip
def test_a_record_with_a_number_that_is_none_is_refused(old: str, new: str, tmp_path: Path) -> None:
    vllm_record(tmp_path / "record", False)
    text = (tmp_path / "record").read_text()
    assert old in text
    (tmp_path / "record").write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match="cannot read"):
        cost_of(tmp_path / "record")


def test_a_record_that_is_no_text_is_refused_without_showing_it(tmp_path: Path) -> None:
    (tmp_path / "record").write_bytes(b"\xff" * 10_000)
    with pytest.raises(ValueError) as refused:
        cost_of(tmp_path / "record")
    assert len(str(refused.value)) < 1000
