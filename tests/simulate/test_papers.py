"""The board of published figures: its verdicts, its loads, its quick form, and that the page shows what is computed."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import policies
from costs.published import Constant
from simulate.board import loads, page
from simulate.board.figures import Figure, judge, play, read_table
from simulate.simulator import simulate
from tests.support import ROOT
from tests.support.scheduling import make_scheduler
from tests.support.simulate import run_command

FIGURES = {figure.name: figure for figure in read_table()}
PAGE = (ROOT / "docs/papers.md").read_text("utf-8")
VERDICTS = {"agrees", "direction only", "does not reproduce"}


@pytest.mark.parametrize(
    ("published", "factors", "verdict"),
    [
        ((2.0,), [1.5, 2.5, 1.9, 2.2, 2.1], "agrees"),  # in the interval
        ((2.2,), [2.0, 2.0], "agrees"),  # within 15 % of the mean
        ((2.4,), [2.0, 2.0], "direction only"),
        ((36.9,), [1.1, 1.2, 1.15], "direction only"),
        ((36.9,), [0.8, 1.2, 1.15], "does not reproduce"),  # the interval includes 1
        ((36.9,), [0.8, 0.7, 0.75], "does not reproduce"),
        ((0.3,), [0.8, 0.7, 0.75], "direction only"),
        ((0.3,), [1.3, 1.2], "does not reproduce"),
        ((2.0, 4.0), [3.0, 3.1], "agrees"),  # between the bounds
        ((2.0, 4.0), [5.0, 5.1], "direction only"),
        ((1.0,), [1.0, 1.0], "agrees"),
    ],
)
def test_a_verdict_is_that_of_its_definition(published: tuple[float, ...], factors: list[float], verdict: str) -> None:
    result = judge(published, factors)
    assert result.verdict == verdict
    assert result.mean == pytest.approx(math.exp(np.log(factors).mean()))
    assert min(factors) <= result.low * (1 + 1e-9)
    assert result.high <= max(factors) * (1 + 1e-9)


def test_lengths_have_the_quantiles_that_were_asked_for() -> None:
    rows = loads.draw("prompt:1730:5696 output:415:834 longest:65536 limit:900", 20_000, 2.0, 1)
    assert np.percentile(rows.prompt, [50, 90]) == pytest.approx([1730, 5696], rel=0.05)
    assert np.percentile(rows.output, [50, 90]) == pytest.approx([415, 834], rel=0.05)
    assert rows.rate == pytest.approx(2.0, rel=0.05)
    assert set(rows.limit or ()) == {900}
    short = loads.draw("prompt:1730:5696 output:415:834 longest:2000", 1000, 2.0, 1)
    assert int((short.prompt + short.output).max()) <= 2000
    assert int(short.prompt.min()) >= 1
    most = loads.draw("prompt:512:512 anyscale:1536", 1000, math.inf, 1)
    assert (set(most.prompt.tolist()), int(most.output.max()) <= 1536, set(most.at.tolist())) == ({512}, True, {0.0})


def test_users_send_the_next_request_when_they_have_an_answer_and_share_beginnings() -> None:
    rows = loads.draw("prompt:20:40 output:10:20 prefixes:3:32 users:4", 60, 1.0, 2)
    run = simulate(make_scheduler("dynamic", 8), rows.sequences(), Constant(a=1.0, b=0.0))
    assert run.answered == 60
    changes = [(seq.arrived_at, 1) for seq in run.done] + [(seq.finished_at or 0.0, -1) for seq in run.done]
    inside = np.cumsum([change for _, change in sorted(changes)])
    assert int(inside.max()) == 4
    heads = {(tuple(ids[:32]), client) for ids, client in zip(rows.ids or (), rows.client or ())}
    assert len(heads) == len({client for _, client in heads}) == 3
    rest = [token for ids in rows.ids or () for token in ids[32:]]
    assert len(rest) == len(set(rest))
    assert [len(ids) for ids in rows.ids or ()] == rows.prompt.tolist()


def test_an_agents_prompts_continue_its_conversation() -> None:
    rows = loads.draw("prompt:20:40 output:5:10 turns:3:2", 7, math.inf, 2)
    assert [call.program for call in rows.calls or ()] == [f"agent-{i // 3}" for i in range(7)]
    assert [call.tool_s for call in rows.calls or ()] == [0.0, 2.0, 2.0, 0.0, 2.0, 2.0, 0.0]
    ids = rows.ids or []
    assert ids[1][: len(ids[0])] == ids[0]
    assert rows.prompt[2] > rows.prompt[1] + rows.output[1]
    assert not {*ids[0]} & {*ids[3]}


def test_some_prompts_are_rare_and_some_beginnings_frequent() -> None:
    rows = loads.draw("prompt:20:40 rare:900 output:5:10 prefixes:4:10", 20_000, 1.0, 3)
    assert (rows.prompt == 910).mean() == pytest.approx(0.008, rel=0.2)
    counts = [(rows.client or []).count(f"prefix-{k}") for k in range(4)]
    assert np.array(counts) / counts[0] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4], rel=0.1)


def test_the_quick_form_computes_all_figures_and_writes_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "arena.json").write_text('{"never_best": ["fixed", "static"]}')
    result, words = run_command(capsys, "papers", "--quick", "--out", str(tmp_path))
    assert list(result["figures"]) == list(FIGURES)
    assert {found["verdict"] for found in result["figures"].values()} <= VERDICTS
    assert all(len(found["factors"]) == 2 for found in result["figures"].values())
    assert "written: " in words
    text = (tmp_path / "papers.md").read_text("utf-8")
    assert "`fixed`, `static`" in text
    assert text.count("beside `") == len(FIGURES)
    assert "<svg" in (tmp_path / "results" / "papers.svg").read_text("utf-8")


def test_a_paper_or_a_policy_is_computed_alone_and_an_unknown_one_refused(capsys: pytest.CaptureFixture[str]) -> None:
    result, _ = run_command(capsys, "papers", "phipps", "--quick", "--jobs", "1")
    assert list(result["figures"]) == ["phipps/wait"]
    result, _ = run_command(capsys, "papers", "sjf", "--quick", "--jobs", "1")
    assert "phipps/wait" in result["figures"]
    _, words = run_command(capsys, "papers", "sarati", code=2)
    assert "sarathi-serve" in words
    _, words = run_command(capsys, "papers", "phipps", "--out", "docs", code=2)
    assert "Leave the names out" in words


def test_the_page_has_each_figure_of_the_table_and_the_policies_exist() -> None:
    assert len(FIGURES) >= 20
    for figure in FIGURES.values():
        loop, _, order = figure.policy.partition("+")
        assert loop in policies.names()
        assert not order or order in policies.order_names()
        shown = f"| [{figure.paper}](#{figure.paper}) | {figure.says} | {page.link(figure.policy)} | {page.published(figure)} | "
        (line,) = [line for line in PAGE.splitlines() if line.startswith(shown)]
        assert line.split(" | ")[-1].rstrip(" |") in VERDICTS
        assert f"{figure.command} {figure.ours}` beside `{figure.beside}`" in PAGE
        assert figure.differs in PAGE


@pytest.mark.parametrize("name", ["phipps/wait", "vtc/share", "multi-bin/2"])
def test_the_page_shows_what_the_runs_give(name: str) -> None:
    figure: Figure = FIGURES[name]
    found = judge(figure.published, [play(figure, seed, False) for seed in range(5)])
    assert f"published {page.published(figure)}, ours {page.ours(found)}: {found.verdict}. " in PAGE
