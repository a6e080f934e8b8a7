"""Logs of requests: every format gives the same requests, and what is wrong with a log is reported or refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from client.places import NAN
from client.report import store
from costs.cost import Affine
from scheduling.sequence import Sequence
from simulate.logs.checks import checked
from simulate.logs.formats import FORMATS
from simulate.logs.log import Request
from simulate.logs.read import read
from simulate.measured.lanes import records, stretches
from simulate.scenario import Chosen, EngineSize
from simulate.simulator import simulate
from tests.support import ROOT
from tests.support.simulate import run_command

DATA = ROOT / "tests" / "data" / "logs"
RUNS = ROOT / "docs" / "data"


def steady(count: int = 40, **changes: Any) -> list[Request]:
    """Return requests without flaws, half a second apart."""
    rows = [Request(i / 2, 10 + i, 4, i / 2 + 0.2, i / 2 + 0.8, str(i)) for i in range(count)]
    return [row._replace(**changes) for row in rows]


def notes(requests: list[Request]) -> str:
    return " ".join(note.text for note in checked(requests).notes)


def changed(requests: list[Request], which: range, change: Callable[[Request], Request]) -> list[Request]:
    return [change(r) if i in which else r for i, r in enumerate(requests)]


@pytest.mark.parametrize("path", sorted(DATA.iterdir()), ids=lambda path: path.name)
def test_every_format_gives_the_same_requests(path: Path) -> None:
    log = read(path)
    np.testing.assert_allclose(log.at, [0, 0.5, 1, 1.55], atol=1e-5)
    assert log.prompt.tolist() == [10, 20, 30, 40]
    assert log.output.tolist() == [3, 2, 4, 2]
    np.testing.assert_allclose(log.first, [0.1, 0.7, 1.25, math.nan], atol=1e-5)
    np.testing.assert_allclose(log.last, [0.3, 0.8, 1.55, math.nan], atol=1e-5)
    assert [seen.latency is None for seen in log.trace.seen] == [False, False, False, True]


@pytest.mark.parametrize("name", ["aiperf.jsonl", "client.json", "vllm_bench.json", "steps.jsonl"])
def test_streams_give_the_times_of_their_chunks(name: str) -> None:
    times, tokens = read(DATA / name).chunks[2]
    np.testing.assert_allclose(times, [1.25, 1.35, 1.45, 1.55], atol=1e-5)
    assert tokens.tolist() == [1, 1, 1, 1]


def test_first_tokens_tell_in_which_order_a_server_saw_the_burst_of_a_probe() -> None:
    firsts = [0.9, 0.2, 0.22, 0.9, math.nan]  # a step takes 50 ms
    burst = [Request(0.0025 * i, 10 + i, 3, first, first + 0.1, str(i)) for i, first in enumerate(firsts)]
    alone = Request(2.0, 99, 3, 2.1, 2.2, "alone")
    log = checked([*burst, alone], designed=True)
    assert log.prompt.tolist() == [11, 12, 10, 13, 14, 99]
    np.testing.assert_allclose(log.at, [0, 0, 0.006, 0.006, 0.006, 2], atol=1e-9)
    assert checked([*burst, alone]).prompt.tolist() == [10, 11, 12, 13, 14, 99]


def test_a_format_is_known_by_its_content_and_the_error_lists_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes((DATA / "spans.jsonl").read_bytes())
    assert read(tmp_path / "log").server == {"engine": "vllm"}
    (tmp_path / "log").write_text('{"a": 1}')
    with pytest.raises(ValueError, match="unknown") as error:
        read(tmp_path / "log")
    assert all(format.made_by in str(error.value) for format in FORMATS)


def test_our_result_names_the_engine() -> None:
    assert read(DATA / "client.json").server == {
        "engine": "ours", "policy": "dynamic", "slots": 8, "tokens_per_step": 512, "kv_tokens": 1600, "page_size": 16,
        "model": "smollm2", "policy_options": {},
    }  # fmt: skip


def test_a_setting_that_is_off_is_known(tmp_path: Path) -> None:
    rows = (DATA / "probe.jsonl").read_text().splitlines()[1:]
    server = {"prefix_cache": False, "slots": 4, "page_size": "x"}
    (tmp_path / "log").write_text("\n".join([json.dumps({"server": server}), *rows]))
    assert read(tmp_path / "log").server == server


@pytest.mark.parametrize("more", ["--kv-tokens=1024", "--acceptance=0.6"])
def test_a_comparison_is_read_and_its_steps_say_the_same(
    more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command(capsys, "run", "dynamic", "--num=30", "--rate=30", more, "--no-plots", "--out", str(tmp_path / "x"))
    log, alone = read(tmp_path / "x"), read(tmp_path / "x" / "iterations.jsonl")
    assert log.server["slots"] == 32
    order = np.argsort(alone.first)[np.argsort(np.argsort(log.first))]
    shift = log.last[0] - alone.last[order][0]  # a log begins with its first arrival
    np.testing.assert_allclose(alone.first[order] + shift, log.first, atol=2e-6)
    np.testing.assert_allclose(alone.last[order] + shift, log.last, atol=2e-6)
    assert alone.output[order].tolist() == log.output.tolist()
    assert alone.prompt[order].tolist() == log.prompt.tolist()
    assert log.trace.seen[3].pages


def test_a_comparison_of_two_policies_asks_for_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_command(
        capsys, "run", "dynamic", "static", "--num", "10", "--rate", "5", "--no-plots", "--out", str(tmp_path / "x")
    )
    for path in (tmp_path / "x", tmp_path / "x" / "requests.csv"):
        with pytest.raises(ValueError, match="2 runs"):
            read(path)
    (tmp_path / "log.csv").write_bytes((tmp_path / "x" / "requests.csv").read_bytes())
    with pytest.raises(ValueError, match="2 runs"):
        read(tmp_path / "log.csv")
    one = store.file_of(tmp_path / "x", {"policy": "static", "load": "poisson:5", "repeat": 0})
    assert read(one).server["policy"] == "static"


@pytest.mark.parametrize(
    ("name", "server"),
    [("llama-3.1-8b-rtx4090", {"slots": 256, "kv_tokens": 41408}), ("qwen3-32b-2xrtxpro6000", {"slots": 128})],
)
def test_the_runs_of_the_documentation_have_their_settings_and_prefixes(name: str, server: dict[str, int]) -> None:
    log = read(RUNS / name)
    assert len(log.first) == 300
    assert not log.notes
    assert server.items() <= log.server.items()
    assert log.server["version"] == "0.19.0"
    a, b = (log.trace.seen[i].pages for i in (40, 47))
    assert a[:28] == b[:28]
    assert a[31] != b[31]
    assert (log.first > log.at).all()


def test_the_settings_of_a_data_parallel_run_are_those_of_all_its_engines(tmp_path: Path) -> None:
    for file in (RUNS / "llama-3.1-8b-rtx4090").iterdir():
        text = file.read_text().replace('"data_parallel_size": 1', '"data_parallel_size": 2')
        (tmp_path / file.name).write_text(text)
    log = read(tmp_path)
    assert {"slots": 512, "tokens_per_step": 4096, "kv_tokens": 82816}.items() <= log.server.items()
    assert log.widening > 1


def test_arrivals_of_another_clock_are_moved_by_the_least_difference() -> None:
    late = [r._replace(sent=1e9 + r.sent, queued=r.sent + (0.1 if i else 0.0)) for i, r in enumerate(steady())]
    np.testing.assert_allclose(checked(late).at, [r.sent for r in steady()], atol=1e-5)


def test_a_log_in_order_of_finish_is_sorted_by_arrival_and_has_no_notes() -> None:
    log = checked(steady()[::-1])
    assert (log.notes, log.widening) == ((), 1)
    assert (np.diff(log.at) > 0).all()
    assert log.prompt[0] == 10


def test_times_of_later_requests_can_be_withheld() -> None:
    log = checked(steady())
    half = log.until(20)
    assert np.isfinite(half.first).sum() == 20
    assert len(half.trace.seen) == 40
    assert half.last[19] == log.last[19]


def test_a_preempted_request_finds_its_own_pages_only() -> None:
    pages = [seen.pages for seen in checked(steady(prompt=64, output=32)).trace.seen]
    assert {len(some) for some in pages} == {6}
    assert len({page for some in pages for page in some}) == 6 * 40


def test_cached_tokens_are_pages_of_an_earlier_request_of_the_client() -> None:
    requests = [r._replace(client="ab"[i % 2], cached=48 * (i > 1)) for i, r in enumerate(steady(prompt=64))]
    log = checked(requests)
    assert not log.notes
    assert log.trace.seen[4].pages[:3] == log.trace.seen[2].pages[:3] == log.trace.seen[0].pages[:3]
    assert log.trace.seen[4].pages[0] != log.trace.seen[3].pages[0]
    engine = EngineSize(8, kv_tokens=4096)
    scheduler, sequences = engine.scheduler(Chosen("dynamic")), log.trace.sequences()
    scheduler.add(sequences[0])
    scheduler.plan(0.0)
    assert sequences[0].hashes[:3] == sequences[2].hashes[:3]


def test_cached_tokens_that_none_had_before_are_reported() -> None:
    assert "cached" in notes(changed(steady(prompt=64), range(1), lambda r: r._replace(cached=32)))


@pytest.mark.parametrize(
    ("requests", "word"),
    [
        (steady(5), "only 5"),
        (changed(steady(), range(3), lambda r: r._replace(error="timeout")), "Cut or failed answers: 3"),
        (changed(steady(), range(3), lambda r: r._replace(last=NAN)), "Cut or failed answers: 3"),
        (changed(steady(), range(3), lambda r: r._replace(prompt=0)), "no token counts: 3"),
        (changed(steady(), range(3), lambda r: r._replace(output=0)), "no token counts: 3"),
        (changed(steady(), range(3), lambda r: r._replace(output=0, error="x")), "before the first token: 3"),
        (changed(steady(), range(3), lambda r: r._replace(sent=NAN)), "no arrival time: 3"),
        (changed(steady(), range(3), lambda r: r._replace(first=r.last + 1)), "contradict each other: 3"),
        (changed(steady(), range(3), lambda r: r._replace(first=r.sent - 1)), "contradict each other: 3"),
        (steady(first=NAN), "first tokens"),
        ([r._replace(sent=0.0) for r in steady()], "at once"),
        (changed(steady(), range(20, 40), lambda r: r._replace(sent=r.sent + 99, first=r.first + 99, last=r.last + 99))
         + [Request(0.1, 10, 400, 0.3, 200.0)], "No request arrived for 99.5 s"),
    ],
)  # fmt: skip
def test_a_flaw_is_a_sentence_and_widens_the_intervals(requests: list[Request], word: str) -> None:
    log = checked(requests)
    assert any(word in note.text and note.widening > 1 for note in log.notes)
    assert log.widening > 1


def test_missing_token_counts_are_the_number_of_chunks() -> None:
    streams = [r._replace(output=0, chunks=[r.first, r.last], counts=[1, 3]) for r in steady()]
    assert set(checked(streams).output) == {4}


@pytest.mark.parametrize(
    ("requests", "remedy"),
    [
        *((requests, "Record") for requests in (
            [], steady(1), steady(2), steady(prompt=0), steady(last=NAN), steady(error="timeout"), steady(sent=NAN),
            steady(first=-1.0), steady(sent=math.inf),
        )),
        ([r._replace(sent=1000 * r.sent, first=1000 * r.first, last=1000 * r.last) for r in steady()], "times in seconds"),
        ([r._replace(first=r.first + 3600, last=r.last + 3600) for r in steady()], "by one clock"),
    ],
)  # fmt: skip
def test_a_log_that_tells_too_little_or_has_other_units_or_clocks_is_refused(
    requests: list[Request], remedy: str
) -> None:
    with pytest.raises(ValueError, match=remedy):
        checked(requests)


def test_bursts_are_no_pause() -> None:
    long = [
        r._replace(sent=2.0 * (i // 4) + i % 4 / 100, output=400, first=20.0, last=30.0 + i)
        for i, r in enumerate(steady())
    ]
    assert "No request arrived" not in notes(long)


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"[]", b"{}", b"[1]", b"\x00\xff\xfe", b"{\"benchmarks\": 1}", b"a,b\n1,2\n", b"hello",
     b'{"request_id": "a"}\nnot JSON\n', b"1" * 5000, b"[" * 100_000, b'{"input_toks": ' + b"1" * 5000 + b"}",
     b'"x"' * 1000, b'{"resourceSpans": [{}]}', b'{"members": [], "slot_steps": {}}', b'{"server": 1}',
     b"sent_s,latency_s,outcome\n1,2\n", b'{"input_lens": 1, "output_lens": 1, "ttfts": 1}', b"a\x00,b\n\x00\n"],
)  # fmt: skip
def test_a_damaged_file_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(data)
    with pytest.raises(ValueError, match="cannot read a log"):
        read(tmp_path / "log")


@pytest.mark.parametrize(
    ("name", "why"), [("nothing", "No such file or directory. Check the path"), (".", "a folder without a log")]
)
def test_a_missing_file_and_an_empty_folder_are_refused(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=why):
        read(tmp_path / name)


def test_a_result_without_send_times_is_refused_unless_all_were_sent_at_once(tmp_path: Path) -> None:
    run = json.loads((DATA / "vllm_bench.json").read_text())
    del run["start_times"]
    (tmp_path / "log").write_text(json.dumps(run))
    with pytest.raises(ValueError, match="start_times"):
        read(tmp_path / "log")
    (tmp_path / "log").write_text(json.dumps({**run, "request_rate": "inf"}))
    assert not read(tmp_path / "log").at.any()


def test_a_sample_of_guidellm_is_reported(tmp_path: Path) -> None:
    text = (DATA / "guidellm.json").read_text().replace('"total": 4', '"total": 400')
    (tmp_path / "log").write_text(text)
    assert "4 of 400" in read(tmp_path / "log").notes[0].text


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.just(10**400), st.text(max_size=3),
    st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
)  # fmt: skip


@given(name=st.sampled_from(sorted(path.name for path in DATA.iterdir() if path.suffix != ".csv")), data=st.data())
@settings(
    max_examples=5 * settings.default.max_examples,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_odd_values_anywhere_raise_nothing_but_value_errors(name: str, data: st.DataObject, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (DATA / name).read_text().splitlines()]
    for _ in range(data.draw(st.integers(1, 3))):
        at: Any = rows
        while isinstance(at, list | dict) and at:
            key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
            if data.draw(st.integers(0, 3)) == 0 or not isinstance(at[key], list | dict):
                at[key] = data.draw(ODD)
                break
            at = at[key]
    (tmp_path / "log").write_text("\n".join(map(json.dumps, rows)))
    try:
        log = read(tmp_path / "log")
    except ValueError:
        return
    assert np.isfinite(log.at).all()
    assert (log.prompt > 0).all()
    assert (log.output > 0).all()


@given(data=st.binary(max_size=200))
@settings(
    max_examples=5 * settings.default.max_examples,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_odd_bytes_raise_nothing_but_value_errors(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(data)
    with pytest.raises(ValueError, match="cannot read"):
        read(tmp_path / "log")


def test_what_our_own_server_has_served_is_a_log(tmp_path: Path) -> None:
    """In its answer to POST /what-if, equal steps are one record."""
    sequences = [Sequence([i] * (8 + i), 4 + i, id=str(i), arrived_at=0.3 * i) for i in range(6)]
    run = simulate(EngineSize(2).scheduler(Chosen("dynamic")), sequences, Affine(base=0.1, decode=0.01), records=True)
    requests = [
        {"id": "any", "t": seq.arrived_at, "prompt_tokens": len(seq.prompt_ids), "output_tokens": seq.max_tokens}
        for seq in run.sequences
    ]
    lane = {"measured": True, "records": records(stretches(run.iterations), 0.0, None)}
    path = tmp_path / "answer.json"
    path.write_text(json.dumps({"served": "dynamic", "slots": 2, "requests": requests, "lanes": [lane]}))
    log = read(path)
    assert log.server["engine"] == "ours"
    assert log.at == pytest.approx([seq.arrived_at for seq in sequences])
    assert log.first == pytest.approx([seq.first_token_at for seq in sequences], abs=1e-5)
    assert log.last == pytest.approx([seq.finished_at for seq in sequences], abs=1e-5)
    assert log.output.tolist() == [seq.max_tokens for seq in sequences]
