"""What is sent and when: every workload and every pace from one seed, and traces with bad lines."""

import json
import math
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from client.data import plan, trace_sha256
from client.workloads import arrivals, catalog, corpus, traces
from client.workloads.arrivals import Arrivals

TEXT = corpus.load()
BURST = Arrivals("burst")


def drawn(spec: str, count: int = 60, pace: Arrivals = BURST, seed: int = 1) -> catalog.Plan:
    return catalog.draw(spec, count, pace, seed, TEXT)


def replayed(file: Path, speed: str = "") -> catalog.Plan:
    return catalog.draw(f"trace:{file}{speed}", None, Arrivals("trace", 1.0), 1, TEXT)


@pytest.mark.parametrize("name", catalog.WORKLOADS)
def test_the_same_seed_gives_the_same_run_byte_for_byte(name: str) -> None:
    runs = [trace_sha256(drawn(name, seed=seed).planned) for seed in (7, 7, 8)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.parametrize("name", catalog.WORKLOADS)
def test_every_prompt_fits_the_context_beside_its_answer(name: str) -> None:
    planned = drawn(name, 200).planned
    assert len(planned) == 200
    for p in planned:
        assert p.prompt.strip()
        assert len(corpus.split(p.prompt)) + p.num_tokens <= corpus.USUAL_CONTEXT


def test_every_workload_is_documented_in_one_line() -> None:
    for form, line in catalog.describe():
        assert 10 < len(line) < 110, form


def test_the_originals_workload_is_the_one_of_the_original_flags() -> None:
    pace = Arrivals("poisson", 2.0)
    assert drawn("original", 30, pace, 5).planned == plan(30, None, "normal", pace, 5)


def test_lengths_are_those_of_the_papers() -> None:
    outputs = np.array([p.num_tokens for p in drawn("anyscale", 4000).planned])
    assert outputs.min() >= 1
    assert outputs.max() <= 512
    assert outputs.mean() == pytest.approx(118.5, rel=0.05)
    orca = drawn("orca", 2000).planned
    assert {1, 128} <= {p.num_tokens for p in orca} <= set(range(1, 129))
    assert {32, 512} <= {len(p.prompt.split()) for p in orca} <= set(range(32, 513))
    assert {p.num_tokens for p in drawn("original-code").planned} == {1, 25, 100}
    assert {p.num_tokens for p in drawn("fixed:20:9").planned} == {9}
    assert all(p.num_tokens == 50 + len(p.prompt.split()) // 5 for p in drawn("llm-mock").planned)
    assert {p.num_tokens for p in drawn("llm-mock:100").planned} == {100}


def test_a_shared_prefix_is_shared_and_a_chat_grows() -> None:
    prompts = [p.prompt for p in drawn("shared-prefix:3:50", 40).planned]
    assert len({prompt[:120] for prompt in prompts}) == 3
    chats: dict[str, list[str]] = {}
    for p in drawn("drawn-turns:4", 40).planned:
        chats.setdefault(p.user, []).append(p.prompt)
    assert len(chats) == 10
    for turns in chats.values():
        assert len(turns) == 4
        assert all(later.startswith(earlier) for earlier, later in pairwise(turns))


def test_a_text_of_ones_own_is_cut_into_prompts(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("alpha beta gamma\n" * 100)
    text = corpus.load(file)
    prompt = text.piece(np.random.default_rng(1), 40)
    assert set(prompt.split()) <= {"alpha", "beta", "gamma", *(("gamma"[:n]) for n in range(5)),
                                   *("alpha"[:n] for n in range(5)), *("beta"[:n] for n in range(4))}  # fmt: skip
    file.write_text("too short")
    with pytest.raises(ValueError, match="Use a longer --text"):
        corpus.load(file)


@pytest.mark.parametrize(
    ("read", "text", "words"),
    [
        (catalog.check, "orka", "Did you mean 'orca'"),
        (catalog.check, "fixed:0:3", "numbers from 1"),
        (catalog.check, "orca:3", "too many numbers"),
        (catalog.check, "anyscale:x", r"anyscale\[:CAP\]"),
        (catalog.check, "trace:nothing.csv", r"nothing\.csv"),
        (catalog.check, "llm-mock:nothing.json", r"nothing\.json' does not exist.*llm-mock:FILE"),
        (catalog.check, "llm-mock:5:6", "too many numbers"),
        (arrivals.parse, "poison:2", "Did you mean 'poisson'"),
        (arrivals.parse, "poisson", "Use poisson:RATE"),
        (arrivals.parse, "poisson:0", "above 0"),
        (arrivals.parse, "gamma:2", "gamma:RATE:B"),
        (arrivals.parse, "closed:2.5", "Use closed"),
        (arrivals.parse, "ramp:1:nan", "Use ramp"),
        (arrivals.parse, "burst:3", "Use burst"),
        (arrivals.parse, "trace:x", "unknown load"),
    ],
)
def test_an_impossible_workload_or_pace_is_refused_with_its_form(
    read: Callable[[str], object], text: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        read(text)


@pytest.mark.parametrize(
    "text", ["poisson:2.5", "gamma:4:0.25", "constant:3", "onoff:3:10", "ramp:0:9", "burst", "wait:2", "closed:8"]
)
def test_a_pace_is_read_as_it_is_written(text: str) -> None:
    assert arrivals.parse(text).text == text


@pytest.mark.parametrize(
    ("pace", "rate", "deviation", "longest"),
    [
        (Arrivals("poisson", 5.0), 5, 1.0, (8 / 5, math.inf)),  # exponential, and never truncated
        (Arrivals("gamma", 5.0, 0.25), 5, 2.0, (8 / 5, math.inf)),
        (Arrivals("constant", 4.0), 4, 0.0, (1 / 4, 1 / 4)),
        (Arrivals("wait", 2.0), 1, 3**-0.5, (1.9, 2)),
        *((pace, math.inf, 0.0, (0, 0)) for pace in (BURST, Arrivals("wait", 0.0), Arrivals("closed", 4))),
    ],
    ids=lambda value: value.text if isinstance(value, Arrivals) else "",
)
def test_gaps_have_the_rate_and_the_burstiness_that_were_asked_for(
    pace: Arrivals, rate: float, deviation: float, longest: tuple[float, float]
) -> None:
    times = np.array(pace.times(20_000, np.random.default_rng(1)))
    gaps = np.diff(times)
    assert (times[0], pace.rate) == (0, rate)
    assert gaps.min() >= 0
    assert longest[0] - 1e-9 <= gaps.max() <= longest[1] + 1e-9
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.03)
    assert gaps.std() == pytest.approx(deviation / rate, rel=0.05, abs=1e-9)
    assert pace.users == (4 if pace.kind == "closed" else None)


@pytest.mark.parametrize(("low", "high"), [(2.0, 10.0), (10.0, 2.0), (4.0, 4.0), (0.0, 8.0)])
def test_a_ramp_goes_from_one_rate_to_the_other(low: float, high: float) -> None:
    times = np.array(Arrivals("ramp", low, high).times(400_000, np.random.default_rng(2)))
    span = 2 * 400_000 / (low + high)
    assert times[0] == 0
    assert times[-1] == pytest.approx(span, rel=0.03)
    tenth = span / 10
    assert (times < tenth).sum() / tenth == pytest.approx(low + (high - low) * 0.05, rel=0.08)
    last = ((times > 9 * tenth) & (times < span)).sum() / tenth
    assert last == pytest.approx(low + (high - low) * 0.95, rel=0.08)


def test_an_onoff_stream_is_silent_every_other_stretch() -> None:
    times = np.array(Arrivals("onoff", 20.0, 5.0).times(4000, np.random.default_rng(3)))
    assert set(np.floor(times / 5) % 2) == {0}
    assert len(times) / times[-1] == pytest.approx(20, rel=0.05)


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
nonsense
2023-11-16 18:15:51.2224670,x,55
2023-11-16 18:15:52.0000000,5000,700
"""


def test_azures_trace_is_read_and_its_bad_lines_are_named(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(AZURE)
    trace = traces.read(file)
    assert [(r.prompt_tokens, r.num_tokens) for r in trace.rows] == [(374, 44), (396, 109), (5000, 700)]
    assert [r.at for r in trace.rows] == pytest.approx([0, 4.314579, 5.31941])
    assert [number for number, _ in trace.bad] == [4, 5]
    note = trace.notes()[0]
    assert "2 of 5 lines" in note
    assert "line 4: 1 columns instead of 3; line 5: prompt 'x' is not" in note
    found = replayed(file, ":2")
    assert [p.at for p in found.planned] == pytest.approx([0, 2.15729, 2.659705])
    assert found.planned[2].num_tokens == 512
    assert any("longer than the context" in note for note in found.notes)


def test_mooncakes_blocks_become_shared_prefixes(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 500, "input_length": 1500, "output_length": 30, "hash_ids": [7, 1, 2]},
        {"timestamp": 1500, "input_length": 1400, "output_length": 20, "hash_ids": [7, 1, 3]},
    ]
    file = tmp_path / "mooncake.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + '\n{"broken\n\n[]\n')
    found = replayed(file)
    first, second = found.planned
    assert (first.at, second.at) == (0, 1)
    shared = len(TEXT.at(7 * 7919, 64)) + 1 + len(TEXT.at(7919, 64))
    assert first.prompt[:shared] == second.prompt[:shared]
    assert first.prompt != second.prompt
    assert "line 3: invalid JSON" in found.notes[0]
    assert "line 5: not a JSON object" in found.notes[0]


def written(tmp_path: Path, *rows: dict[str, object]) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_qwens_traces_are_in_seconds_with_parents_and_blocks_of_16_tokens(tmp_path: Path) -> None:
    shape = {"output_length": 5, "type": "text", "hash_ids": [1, 2, 3]}
    file = written(
        tmp_path,
        *({"chat_id": i, "parent_chat_id": parent, "timestamp": 1.5 * i, "input_length": 40 + i, **shape}
          for i, parent in enumerate([-1, 0, 99, 1])),
    )  # fmt: skip
    found = traces.read(file)
    assert ([row.at for row in found.rows], found.notes()) == ([0, 1.5, 3, 4.5], [])
    sent = replayed(file).planned
    turns = [(p.call.after, p.call.tool_s) for p in sent if p.call]
    assert turns == [((), 0), ((0,), 1.5), ((1,), 3), ((), 0)]  # the parent of the last one is not in the file
    assert [len(corpus.split(p.prompt)) for p in sent[:2]] == [40, 41]


def test_more_blocks_than_a_prompt_holds_are_refused_and_a_line_may_name_their_size(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2, 3, 4, 5]}
    found = traces.read(written(tmp_path, row, row | {"block_size": 128}, row | {"hash_ids": [1, 2]}))
    assert [(row.block, row.blocks) for row in found.rows] == [(128, (1, 2, 3, 4, 5)), (512, (1, 2))]
    assert "line 1: 5 hash_ids for 600 tokens" in found.notes()[0]


@pytest.mark.parametrize(("gap", "notes"), [(0.25, 1), (2, 1), (3000, 0), (0, 0)])
def test_times_that_are_hardly_milliseconds_are_doubted(tmp_path: Path, gap: float, notes: int) -> None:
    rows = ({"timestamp": 1_700_000_000 + gap * i, "input_length": 9, "output_length": 5} for i in range(12))
    assert len(traces.read(written(tmp_path, *rows)).notes()) == notes


def test_a_trace_of_our_own_comes_back_as_it_was(tmp_path: Path) -> None:
    before = drawn("drawn-turns", 12, Arrivals("poisson", 3.0)).planned
    names = ("at", "prompt", "num_tokens", "user")
    file = written(tmp_path, *({name: value for name in names if (value := getattr(p, name)) != ""} for p in before))
    assert replayed(file).planned == before


def test_a_trace_says_which_answers_follow_a_grammar(tmp_path: Path) -> None:
    row = {"at": 0, "prompt_tokens": 9, "num_tokens": 5}
    trace = traces.read(written(tmp_path, *(row | more for more in ({}, {"form": True}, {"form": "json"}))))
    assert [row.constrained for row in trace.rows] == [False, True]
    assert trace.bad == [(3, "form is not true or false")]


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"
DAY = "2024-05-10 00:00:00"


def rows_at(*stamps: str) -> str:
    return "\n".join([HEAD, *(f"{stamp},10,5" for stamp in stamps)])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *((text, "has no request") for text in ("", "a,b\n1,2\n", "{}\n")),
        ("at,ContextTokens,ContextTokens\n1,2,3\n", "line 1: the column 'ContextTokens' appears 2 times"),
        ('[{"at": 0, "prompt_tokens": 10, "num_tokens": 5}]', "line 1: it is a JSON array, or"),
        (f"{HEAD}\n0,1,1".encode("utf-16"), "not text in UTF-8"),
        ('"' + "x" * 200_000, "line 1: "),
        (HEAD, "no line with one"),
        (rows_at(f"{DAY}Z", f"{DAY}Z", "2024-05-10 00:00:01"), r"line 4: .* line 2 "),  # times of two forms
        (rows_at(f"{DAY}Z", f"{DAY}Z", "7"), r"line 4: .* line 2 "),
        (rows_at(DAY, DAY, "2024-05-10 00:00:01Z"), r"line 4: .* line 2 "),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_file_that_is_no_trace_is_refused_plainly(tmp_path: Path, content: str | bytes, words: str) -> None:
    file = tmp_path / "trace"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=words):
        traces.read(file)


def times(tmp_path: Path, *stamps: str) -> list[float]:
    file = tmp_path / "trace.csv"
    file.write_text(rows_at(*stamps))
    trace = traces.read(file)
    assert trace.bad == []
    return [row.at for row in trace.rows]


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kolkata"])
@pytest.mark.parametrize(
    ("stamps", "expected"),
    [
        (["2024-05-10 01:00:00.000000+01:00", "2024-05-10 00:00:01.5+00:00"], [0, 1.5]),
        (["2024-05-10T00:00:00Z", "2024-05-10 05:30:02.25 +0530", "2024-05-09 19:00:04-05"], [0, 2.25, 4]),
        (["2024-05-10 00:00:00 UTC", "2024-05-10 00:00:00.1234567z"], [0, 0.1234567]),
        (["2024-03-10 01:59:59", "2024-03-10 03:00:00", "2024-11-03 01:30", "2024-11-04"], [0, 3601, 20561401, 20642401]),
    ],
)  # fmt: skip
def test_a_date_keeps_its_zone_and_without_one_is_in_utc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zone: str, stamps: list[str], expected: list[float]
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert times(tmp_path, *stamps) == pytest.approx(expected, abs=1e-6)
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bom.csv", "arrival_s,prompt_tokens,output_tokens\n0,10,5\n"),
        ("bom.jsonl", '{"timestamp": 0, "input_length": 10, "output_length": 5}\n'),
        ("cr.csv", "arrival_s,prompt_tokens,output_tokens\r0,10,5\r"),
    ],
)
def test_a_byte_order_mark_does_not_hide_a_column(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
    assert [row.prompt_tokens for row in traces.read(tmp_path / name).rows] == [10]
    (tmp_path / "text.txt").write_text("\ufeff" + "alpha beta " * 100)
    assert "\ufeff" not in corpus.load(tmp_path / "text.txt").at(0, 40)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('1,10,5,"a\nb"', "a quoted value does not end on this line"),
        (f"1,10,5,{'x' * 200_000}", "field larger than"),
        ("1,999999999,5,a", "more than 10,000,000 tokens"),
        ("1,10,1e8,a", "more than 10,000,000 tokens"),
        ("2024-13-10 00:00:00Z,10,5,a", "month must be in"),
        ("2024-05-10 00:00:00+24:00,10,5,a", "no zone from"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_by_its_line(tmp_path: Path, row: str, words: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(f"arrival_s,prompt_tokens,output_tokens,user\n0,10,5,b\n{row}\n")
    trace = traces.read(file)
    assert [r.user for r in trace.rows] == ["b"]
    assert trace.bad[0][0] == 3
    assert words in trace.bad[0][1]


@pytest.mark.parametrize("pace", [Arrivals(kind, 1e-320, 1.0) for kind in ("poisson", "gamma", "constant", "onoff")])
def test_a_run_without_an_end_is_refused(pace: Arrivals, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Use a higher rate"):
        drawn("uniform", 9, pace)
    file = tmp_path / "trace.csv"
    file.write_text(f"{HEAD}\n0,1,1\n1,1,1\n")
    with pytest.raises(ValueError, match="Play the trace faster"):
        replayed(file, ":1e-320")
