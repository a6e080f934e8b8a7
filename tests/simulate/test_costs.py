"""Cost models against the values that their sources publish, and the terms of the default law one by one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from costs import cost as costs
from costs import published
from costs.cost import Affine
from costs.steps import Step, beyond, decoding, prefilling, seen_in, step_of
from scheduling.iteration import Plan
from scheduling.sequence import Sequence
from simulate.simulator import simulate
from tests.support.data import path_of
from tests.support.scheduling import make_scheduler
from tests.support.simulate import sequences


def seconds(name: str, step: Step, **options: float) -> float:
    return published.make(name, options).seconds(step)


def row(prompt: int, computed: int, outputs: int = 0) -> Sequence:
    """Return a sequence of that prompt with `computed` tokens in its pages."""
    seq = Sequence([0] * prompt, 1000, output_ids=[0] * outputs)
    seq.computed = computed
    return seq


MIXED = Step(decodes=2, context=420, prefills=1, prompt=200, pairs=20100.0, squares=40000,
             longest=300, widest=200, work=420 + 200 * 200)  # fmt: skip


def test_a_whole_request_of_llm_mock_takes_its_published_time() -> None:
    run = simulate(make_scheduler("nobatch", 1), sequences([(0, 100, 71)]), published.make("llm-mock"))
    steps = 100**2 + sum(100 + k for k in range(1, 71))
    assert run.latency[0] == pytest.approx(steps / 468000 + 0.06 * 71, abs=1e-9)
    assert run.latency[0] == pytest.approx(4.30163, abs=5e-6)


def test_memory_scales_what_bandwidth_bounds_alone() -> None:
    slow, fast = (seconds("distserve-opt13b", decoding(8, 4800), memory=m) for m in (2, 1))
    assert slow - fast == pytest.approx((19.9347 + 6.26936e-4 * 4800) / 1000)
    assert seconds("distserve-opt13b", prefilling(512), memory=2) == pytest.approx(0.072149, abs=1e-6)


def vtc_profile() -> tuple[np.ndarray, np.ndarray]:
    """Return (rows, context, seconds) of each decode step and (tokens, prompts, seconds) of each prefill of the profile."""
    path = path_of("vtc/cost_profile.json")
    decode, prefill = [], []
    for length, by_output in json.loads(path.read_text()).items():
        for output, (batch, pre, dec) in by_output.items():
            p, n = int(length), int(output)
            prefill.append((p * batch, batch, pre * batch))
            if n > 1:
                decode.append((batch, batch * (p + (n + 1) / 2), dec * batch / n))
    assert (len(decode), len(prefill)) == (16, 23)
    return np.array(decode, float), np.array(prefill, float)


def least_squares(x: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return coefficients of least relative errors, none negative, and these errors."""
    from scipy.optimize import nnls

    found = nnls(x / t[:, None], np.ones(len(t)))[0]
    return found, np.abs(x @ found / t - 1)


def with_knee(decode: np.ndarray, knee: int) -> tuple[np.ndarray, np.ndarray]:
    """Fit base, row and context to decode steps when only rows beyond `knee` cost anything."""
    rows, context, t = decode.T
    return least_squares(np.stack([np.ones(len(t)), np.maximum(0, rows - knee), context], 1), t)


def test_the_vtc_constants_are_the_fit_of_its_profile() -> None:
    decode, prefill = vtc_profile()
    knee = min(range(139), key=lambda k: float((with_knee(decode, k)[1] ** 2).sum()))
    found, error = with_knee(decode, knee)
    law = published.VTC_A10G
    assert knee == law.knee
    assert found == pytest.approx([law.base, law.row, law.context], rel=1e-4)
    assert error.mean() == pytest.approx(0.0078, abs=1e-4)
    assert error.max() < 0.019
    found, error = least_squares(prefill[:, :2], prefill[:, 2])
    assert found == pytest.approx([law.token, law.request], rel=2e-3)
    assert error.mean() == pytest.approx(0.051, abs=6e-4)


def test_a_line_through_the_vtc_profile_is_four_times_as_far_off() -> None:
    decode, _ = vtc_profile()
    line, error = with_knee(decode, 0)
    assert line * 1000 == pytest.approx([18.159, 0.21513, 1.8906e-3], rel=2e-3)
    assert (error.mean(), error.max()) == pytest.approx((0.0355, 0.105), abs=6e-4)
    assert error.mean() > 4 * with_knee(decode, published.VTC_A10G.knee)[1].mean()


def test_rows_up_to_the_knee_cost_nothing_of_their_own() -> None:
    def step(rows: int) -> float:
        return seconds("vtc-a10g", decoding(rows, 3000))

    assert step(1) == step(48) > published.VTC_A10G.base
    assert step(58) - step(48) == pytest.approx(10 * published.VTC_A10G.row)


FORMULAS = [
    ("constant", decoding(5, 0), 0.008 + 5 * 0.0002),
    ("constant", MIXED, 0.008 + 3 * 0.0002),
    ("oracle-a", decoding(5, 0), 0.009),
    ("oracle-a", prefilling(1, 1, 1), 0.011),
    ("ssjf", prefilling(10), 0.12),
    ("ssjf", decoding(7, 70), 0.02),
    ("splitwise", prefilling(512), 0.072149),
    ("splitwise", Step(decodes=8, prefills=1, prompt=504), 1.1 * 0.072149),
    ("splitwise", decoding(12, 0), (0.022811 + 0.025686) / 2),
    ("inoue-v100", prefilling(1, 1), 1.8874e-3 + 2 * 0.1438e-3),
]
# As their sources publish them, with so many digits.
LLM_MOCK = [
    ("llm-mock", prefilling(500), 0.59418803418803),
    ("llm-mock", prefilling(100), 0.08136752136752),
    ("llm-mock", decoding(1, 500, 500), 0.06106837606838),
    ("llm-mock", MIXED, 0.44461538461538),
    ("llm-mock-ragged", MIXED, 0.14636752136752),
    ("llm-mock", Step(), 0.06),
    ("llm-mock", prefilling(500, cached=100), 500 * 400 / 468000 + 0.06),
]
DISTSERVE = [
    ("distserve-opt13b", prefilling(512), 72.149e-3),
    ("distserve-opt13b", prefilling(*[512] * 4), 234.287e-3),
    ("distserve-opt13b", decoding(8, 8 * 600), 23.252e-3),
    ("distserve-opt13b", decoding(94, 94 * 512), 53.728e-3),
    ("distserve-opt13b", decoding(95, 95 * 512), 50.407e-3),
]
KNOWN = ((FORMULAS, 1e-15), (LLM_MOCK, 1e-9), (DISTSERVE, 6e-7))  # and how many seconds they may be off


@pytest.mark.parametrize(("name", "step", "expected", "off"), [(*row, off) for rows, off in KNOWN for row in rows])
def test_a_named_model_charges_by_its_formula(name: str, step: Step, expected: float, off: float) -> None:
    assert seconds(name, step) == pytest.approx(expected, rel=1e-12, abs=off)


def test_ssjf_charges_a_static_batch_for_its_longest_answer() -> None:
    trace = sequences([(0, 8, 10), (0, 8, 50), (0, 8, 30)])
    run = simulate(make_scheduler("static", 4), trace, published.make("ssjf"))
    assert run.latency == pytest.approx([0.1 + 0.02 * 50] * 3)


def test_the_default_law_charges_each_term() -> None:
    law = Affine(base=1, prefill=2, token=3, hinge=5, knee=100, row=7, context=11, pair=13, mask_row_s=17)
    assert law.seconds(decoding(4, 90)._replace(masks=2)) - law.seconds(decoding(4, 90)) == 2 * 17
    assert law.seconds(decoding(4, 90)) == 1 + 4 * 3 + 4 * 7 + 90 * 11
    chunk = prefilling(150, cached=30)
    assert chunk.pairs == 120 * (30 + 121 / 2)
    assert law.seconds(chunk) == 1 + 2 + 120 * 3 + 20 * 5 + 7 + chunk.pairs * 13


def test_a_mixture_reads_more_experts_the_more_tokens_it_computes_but_not_more_than_all() -> None:
    law = Affine(base=1, experts=8, chosen=0.25)
    assert [law.seconds(decoding(rows, 0)) for rows in (1, 2)] == [1 + 2, 1 + 8 * (1 - 0.75**2)]
    assert law.seconds(prefilling(1000)) == pytest.approx(9)
    assert law.flat


def test_a_step_without_prompts_computes_as_many_rows_as_its_graph_has() -> None:
    law = Affine(decode=1, prompt=0.5, context=0.01, buckets=(1, 2, 4, 8))
    assert [law.seconds(decoding(rows, 0)) for rows in (1, 3, 4, 5, 8, 9)] == [1, 4, 4, 8, 8, 9]
    assert law.seconds(decoding(3, 100)) == 5
    assert law.seconds(Step(decodes=3, prefills=1, prompt=10)) == 8


def test_constants_of_older_files_and_commands_still_count(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text('{"cost": {"kind": "affine", "base": 8, "token": 3, "row": 2}}', "utf-8-sig")
    law = Affine(base=8, decode=5, prompt=3, start=2, mask_row_s=0)
    assert costs.load(path)[0] == law == Affine(8, token=3, row=2)
    assert published.make("affine", {"base": 8, "token": 3, "row": 2}) == law
    assert published.make("affine", {"row": 0.0, "context": 1.0}) == Affine(base=0.008, token=1e-4, context=1.0)


def test_a_plan_is_summed_up_with_its_padding_and_its_held_rows() -> None:
    plan = Plan(1, 0.0, [row(8, 0), row(3, 0)], [8, 3], padded=True)
    assert step_of(plan) == Step(0, 0, 2, 16, 8 * 4.5 + 3 * 2, 73, 8, 8, 73)
    plan = Plan(2, 0.0, [row(8, 8, 1)], [1], held=[row(3, 4, 2)], padded=True)
    assert step_of(plan) == Step(2, 9 + 5, longest=9, widest=1, work=14)


def test_each_token_that_a_constrained_request_samples_has_a_mask() -> None:
    rows = [row(8, 0), row(8, 0), row(8, 8, 1), row(8, 8, 1), row(8, 8, 1)]
    for seq in rows[:4]:
        seq.constrained = True
    plan = Plan(1, 0.0, rows, [8, 5, 1, 3, 1], drafts=[[], [], [], [7, 7], []])
    assert step_of(plan).masks == 1 + 0 + 1 + 3  # the second prompt goes on


def test_interpolation_never_falls_below_its_first_point_and_goes_on_beyond_its_last() -> None:
    points = ((2, 1.0), (4, 2.0))
    assert [published.interpolate(points, n) for n in (1, 2, 3, 4, 6)] == [1.0, 1.0, 1.5, 2.0, 3.0]
    assert published.interpolate(((8, 3.0),), 100) == 3.0


def test_a_model_is_the_same_after_it_was_written_and_read(tmp_path: Path) -> None:
    law = Affine(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0.5, (1, 2, 4))
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"cost": costs.to_dict(law), "host": {"alpha0": 0.002}}))
    read, host, _ = costs.load(path)
    assert (read, host.alpha0) == (law, 0.002)
    assert published.make(str(path)) == law


def test_a_step_is_compared_with_the_largest_and_the_smallest_that_were_measured() -> None:
    seen = seen_in([decoding(8, 800), prefilling(100)])
    assert seen == {"decodes": 8, "prompt": 100, "context": 800, "least": 8}
    assert beyond(seen, decoding(12, 100)) == 1.5
    assert beyond(seen, decoding(6, 1600)) == beyond(seen, prefilling(100, 100)) == 2
    assert beyond(seen, decoding(2, 100)) == 2
    assert beyond(seen, decoding(8, 800)) == 1
    assert beyond(seen_in([decoding(8, 800)]), prefilling(1)) == beyond(seen_in([]), decoding(1, 1)) == float("inf")


def test_a_mistyped_model_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean 'llm-mock'"):
        published.make("lm-mock")
    with pytest.raises(ValueError, match=r"has no constant 'c'. Use a, b"):
        published.make("constant", {"c": 1})
    with pytest.raises(ValueError, match=r"Make one with '\./eb simulate calibrate"):
        published.make("absent.json")


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"cost": {"kind": "interpolated", "decode": [[1, 2]]}}',
        '{"cost": [], "host": []}',
        '{"cost": {"kind": "affine"}, "host": []}',
        "[" * 100_000,
    ],
)
def test_a_file_that_is_no_cost_model_is_refused_with_the_remedy(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"cannot read a cost model .* Make one with"):
        costs.load(path)
