"""Every measure against a server of known delays, and against cases with known answers."""

import contextlib
import functools
import json
import statistics
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from client import runs
from client.data import Chat, Planned
from client.report import figures, measure, tables
from client.send import load
from client.send.dialects import APIS, Dialect
from client.send.sse import Events
from client.send.target import Target
from client.workloads import catalog
from client.workloads.arrivals import Arrivals
from terminal.options import Values
from tests.support import wait_until
from tests.support.mock_server import MockServer

TTFT, ITL, TOKENS = 0.05, 0.02, 6


def trace(count: int, gap: float = 0.01, tokens: int = TOKENS) -> list[Planned]:
    return [Planned(i, i * gap, "To be", tokens) for i in range(count)]


def sent(server: MockServer, dialect: Dialect, planned: list[Planned], **how: Any) -> load.LoadRun:
    run = load.LoadRun(Target(server.url, dialect=dialect), planned, **how)
    run.start()
    assert run.wait(60)
    run.close()
    return run


def facts(count: int, **more: Any) -> dict[str, Any]:
    known = {"config": {}, "seed": 1, "request_rate": 1.0, "server_before": None, "server_after": None}
    return {**known, "num_prompts": count, **more}


def outcome(index: int = 0, **changes: Any) -> measure.Outcome:
    usual = {"asked_tokens": 10, "intended": 0.0, "sent": 0.0, "ended": 1.0, "tokens": 10}
    return measure.Outcome(index, **{**usual, **changes})


def close(ms: float, value: float) -> bool:
    """Allow for a busy machine, which can only make times longer."""
    return ms - 2 <= value <= 10 * ms


def up_to_three_times(test: Any) -> Any:
    """Repeat a test of measured times that a pause of the machine has spoiled."""

    @functools.wraps(test)
    def repeated(*args: Any, **kwargs: Any) -> None:
        for _ in range(2):
            with contextlib.suppress(AssertionError):
                return test(*args, **kwargs)
        return test(*args, **kwargs)

    return repeated


@pytest.mark.parametrize("api", APIS)
@up_to_three_times
def test_every_measure_of_a_stream_is_right(server: MockServer, api: str) -> None:
    server.ttft, server.itl, server.queue_s = TTFT, ITL, 0.004
    run = sent(server, Dialect(api, stream=True), trace(30))
    outcomes = run.outcomes()
    assert [o.error for o in outcomes] == [""] * 30
    result = measure.result(outcomes, **facts(30, stalls=run.stalls))
    total = 1000 * (TTFT + ITL * (TOKENS - 1))
    assert close(1000 * TTFT, result["median_ttft_ms"])
    assert close(total, result["median_e2el_ms"])
    # A gap may be shorter than the server's, after a token that was read late; the last token never comes early.
    for ttft, gaps, e2el in zip(result["ttfts"], result["itls"], result["e2els"]):
        assert total - 2 <= 1000 * (ttft + sum(gaps)) <= 1000 * e2el + 0.001
    every = [1000 * gap for gaps in result["itls"] for gap in gaps]
    means = [1000 * sum(gaps) / (TOKENS - 1) for gaps in result["itls"]]
    assert result["median_itl_ms"] == pytest.approx(statistics.median(every))
    assert statistics.median(means) <= result["median_tpot_ms"] + 0.001 <= 10 * ITL * 1000
    assert close(total / TOKENS, result["median_normalized_latency_ms"])
    assert result["output_lens"] == [TOKENS] * 30
    # Tokens that a busy machine reads together with the first have no gap.
    assert all(len(gaps) < TOKENS for gaps in result["itls"])
    assert any(result["itls"])
    if api == "inference":
        assert result["median_queue_ms"] == pytest.approx(4)
        assert (outcomes[0].batch_mean, outcomes[0].batch_max) == (2.0, 3)
    else:
        assert result["total_input_tokens"] == 30 * 7
        assert result["total_token_throughput"] > result["output_throughput"]


@pytest.mark.parametrize("api", APIS)
@up_to_three_times
def test_a_whole_answer_has_a_latency_and_no_ttft(server: MockServer, api: str) -> None:
    server.ttft, server.itl = TTFT, ITL
    run = sent(server, Dialect(api), trace(20))
    result = measure.result(run.outcomes(), **facts(20))
    assert result["failed"] == 0
    assert close(1000 * (TTFT + ITL * 5), result["median_e2el_ms"])
    assert result["mean_ttft_ms"] is result["mean_itl_ms"] is result["ttfts"] is None
    assert result["output_lens"] == [20 if api == "tgi" else TOKENS] * 20


def test_the_dialects_request_an_exact_number_of_tokens_and_the_temperature_that_the_user_names(
    server: MockServer,
) -> None:
    for dialect in (Dialect("inference", True), Dialect("openai", True, "bard"), Dialect("tgi")):
        sent(server, dialect, trace(1))
    for dialect in (Dialect(temperature=0), Dialect("openai", temperature=0.5), Dialect("tgi", temperature=0)):
        sent(server, dialect, trace(1))
    sent(server, Dialect(temperature=0), [Planned(0, 0.0, "To be", 6, chat=Chat())])
    native, openai, tgi, *named = server.asked
    assert server.paths[:3] == ["/inference", "/v1/completions", "/generate"]
    assert native == {"prompt": "To be", "num_tokens": 6, "stream": True}
    assert (openai["model"], openai["max_tokens"], openai["ignore_eos"]) == ("bard", 6, True)
    assert tgi == {"inputs": "To be", "parameters": {"max_new_tokens": 6, "do_sample": True}}
    assert [body.get("temperature") for body in named] == [0, 0.5, None, 0]
    assert named[2]["parameters"] == {"max_new_tokens": 6, "do_sample": False}  # TGI refuses a temperature of 0


def test_the_size_of_a_chunk_of_many_tokens_is_kept(server: MockServer) -> None:
    server.together = 4
    (only,) = sent(server, Dialect("openai", True), trace(1, tokens=10)).outcomes()
    assert (only.tokens, only.chunks, len(only.gaps)) == (10, (4, 4, 2), 2)


@pytest.mark.parametrize("api", APIS)
def test_a_stream_without_its_final_event_has_failed(server: MockServer, api: str) -> None:
    server.cut_after = 3
    (only,) = sent(server, Dialect(api, True), trace(1)).outcomes()
    assert (only.error, only.tokens, len(only.gaps)) == ("stream cut", 0, 2)
    server.last_words = {"error": {"message": "out of memory", "type": "server_error"}}
    (only,) = sent(server, Dialect(api, True), trace(1)).outcomes()
    assert (only.error, only.detail) == ("error event (server_error)", "out of memory")


def test_garbage_in_a_stream_has_failed(server: MockServer) -> None:
    server.cut_after, server.last_words = 1, {"neither": "text"}
    (only,) = sent(server, Dialect("inference", True), trace(1)).outcomes()
    assert only.error == "unreadable answer"


def test_events_are_cut_wherever_the_network_cut_them() -> None:
    whole = b': ping\n\ndata: {"a": 1}\n\ndata:two\r\n\r\nevent: x\ndata: 3\n\n'
    for size in (1, 2, 7, 100):
        events = Events()
        pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
        assert [d for p in pieces for d in events.cut(p)] == [b'{"a": 1}', b"two", b"3"]


def test_a_stalled_client_is_reported_as_lag(server: MockServer) -> None:
    server.ttft = 0.05
    stalls = iter([0.3])  # after the first answer
    run = load.LoadRun(Target(server.url), trace(60, 0.03), on_outcome=lambda o: time.sleep(next(stalls, 0)))
    run.start()
    assert run.wait(60)
    outcomes = run.outcomes()
    run.close()
    numbers = measure.result(outcomes, **facts(60, stalls=run.stalls))
    lag = numbers["client_lag"]
    assert lag["max_ms"] > 250
    assert lag["stall_max_ms"] > 250
    assert tables.lateness([numbers]) in tables.warnings_of(numbers, outcomes)
    in_time = {**numbers, "client_lag": {**lag, "p99_ms": 0.1, "stall_max_ms": 0.0}}
    for late in ({"p99_ms": 10.1}, {"stall_max_ms": 50.1}):
        run = {"client_lag": in_time["client_lag"] | late}
        assert "in 1 of 2 runs" in tables.lateness([run, in_time])
    assert tables.lateness([in_time]) == ""


def test_a_closed_loop_has_no_more_requests_than_users(server: MockServer) -> None:
    server.ttft = 0.2
    outcomes = sent(server, Dialect(), trace(24, gap=0.0), users=4).outcomes()
    assert len(outcomes) == 24
    assert measure.max_concurrent(outcomes) <= 4
    assert server.most_running <= 4
    # A user's request is due when the user is free: a slow server is no lag of the client.
    assert measure.client_lag(outcomes)["p50_ms"] < 300  # and not 600, half of the whole run
    assert [body["num_tokens"] for body in server.asked] == [TOKENS] * 24


def test_a_thousand_requests_are_open_at_once(server: MockServer) -> None:
    server.most = 1000
    planned = [Planned(i, i * 0.0015, "To be", 1) for i in range(1000)]
    outcomes = sent(server, Dialect(), planned).outcomes()  # none is answered before all are there
    assert sum(not o.error for o in outcomes) == 1000
    assert measure.max_concurrent(outcomes) == 1000
    assert all(o.sent >= o.intended for o in outcomes)


def test_the_throughputs_are_those_of_the_definitions() -> None:
    outcomes = [
        outcome(0, ended=2.0, tokens=20, prompt_tokens=5),
        outcome(1, intended=1.0, sent=1.0, ended=5.0, tokens=30, prompt_tokens=7),
        outcome(2, intended=1.0, sent=1.0, ended=9.0, tokens=0, error="timeout"),
    ]
    numbers = measure.throughput(outcomes)
    assert (numbers["duration"], numbers["completed"], numbers["failed"]) == (5.0, 2, 1)
    assert numbers["output_throughput"] == 10
    assert numbers["total_token_throughput"] == pytest.approx(62 / 5)


def test_goodput_counts_requests_within_all_limits() -> None:
    good = outcome(0, first=0.1, ended=1.0, tokens=10)
    late = replace(good, first=0.6)
    slow = replace(good, ended=3.0)
    one = replace(good, first=0.3, ended=0.3, tokens=1)
    slos = {"ttft": 500.0, "tpot": 150.0}
    assert [measure.meets(o, slos) for o in (good, late, slow, one)] == [True, False, False, True]
    assert not measure.meets(replace(good, error="timeout"), slos)
    assert not measure.meets(outcome(), slos)
    result = measure.result([good, late], **facts(2, slos=slos))
    assert result["request_goodput"] == 1.0


def test_fairness_is_a_line_and_jains_index() -> None:
    done = [outcome(i, asked_tokens=n, tokens=n, ended=0.5 + 0.1 * n) for i, n in enumerate([5, 10, 20, 40])]
    fair = measure.fairness(done)
    assert fair["slope_ms_per_token"] == pytest.approx(100)
    assert fair["intercept_ms"] == pytest.approx(500)
    assert fair["r"] == pytest.approx(1)
    assert figures.jain([3, 3, 3]) == pytest.approx(1)
    assert figures.jain([1, 0, 0, 0]) == pytest.approx(0.25)
    assert figures.fit([5, 5], [1, 2]) is None


@pytest.mark.full
def test_95_percent_intervals_contain_the_true_mean_as_often() -> None:
    rng = np.random.default_rng(3)
    covered = 0
    for seed in range(120):
        sample = rng.exponential(2.0, 100)
        ((low, high),) = figures.bootstrap(lambda at, s=sample: s[at].mean(-1, keepdims=True), 100, seed=seed)
        covered += low <= 2.0 <= high
    assert covered / 120 > 0.84
    assert figures.intervals("e2el", [1.0] * 9) == dict.fromkeys(["mean_e2el_ms", "p50_e2el_ms", "p99_e2el_ms"])


def test_the_peak_is_the_best_second_of_streams() -> None:
    burst = outcome(0, first=0.5, gaps=(0.1, 1.0), chunks=(0, 0, 0), tokens=9)
    assert measure.peak([burst]) == pytest.approx(6)
    assert measure.peak([burst, outcome(1)]) is None


def test_a_warm_up_is_sent_and_not_measured(server: MockServer) -> None:
    answered = runs.warm_up(Target(server.url), trace(2), 3)
    assert answered == 3
    assert [body["num_tokens"] for body in server.asked] == [runs.WARMUP_TOKENS] * 3


def test_a_run_that_a_signal_ends_records_nothing_later(server: MockServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.ttft = 60

    def ended(run: load.LoadRun, seconds: float | None = None) -> bool:
        wait_until(lambda: len(server.asked) == 6)
        raise SystemExit(143)

    monkeypatch.setattr(load.LoadRun, "wait", ended)
    with pytest.raises(SystemExit):
        runs.send(Target(server.url), trace(6, 0.0), Console(stderr=True))
    assert not [thread for thread in threading.enumerate() if thread.name == "load"]


def test_a_closed_pace_reaches_the_engine(server: MockServer) -> None:
    server.ttft = 0.01
    console = Console(stderr=True)
    done = runs.send(Target(server.url), trace(6, 0.0), console, Arrivals("closed", 2))
    assert (len(done.outcomes), done.interrupted) == (6, False)
    assert server.most_running <= 2


def test_the_result_has_the_keys_of_vllm_bench_serve(server: MockServer) -> None:
    wanted = {
        "date", "backend", "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency",
        "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
        "request_throughput", "request_goodput", "output_throughput", "total_token_throughput",
        "max_output_tokens_per_s", "max_concurrent_requests", "input_lens", "output_lens", "ttfts",
        "itls", "errors", "seed", "trace_sha256", "policy", "config", "machine", "versions",
        "client_lag", "server_before", "server_after",
        *(f"{s}_{m}_ms" for s in ("mean", "median", "std", "p50", "p90", "p99")
          for m in ("ttft", "tpot", "itl", "e2el")),
    }  # fmt: skip
    plan, flags = catalog.Plan(trace(1), Arrivals("burst"), 1), Values(origin={}, goodput=[])
    assert wanted <= set(runs.measure(Target(server.url), plan, {}, flags, 0, Console(stderr=True), lambda _: None)[0])


def test_latency_counts_from_the_intended_time_and_holds_the_lag() -> None:
    outcomes = [outcome(0), outcome(1, intended=1.0, sent=1.5, ended=3.0, tokens=20)]
    result = measure.result(outcomes, **facts(2))
    assert result["e2els"] == [1.0, 2.0]
    assert result["mean_e2el_ms"] == 1500
    assert result["p90_e2el_ms"] == pytest.approx(1900)
    assert result["client_lag"]["max_ms"] == 500
    assert result["client_lag"]["p50_ms"] == 250
    assert result["mean_latency_per_token_ms"] == pytest.approx(100)
    assert result["duration"] == 3.0
    assert result["output_throughput"] == 10
    assert any("lag p99 of 495.0 ms" in warning for warning in tables.warnings_of(result, outcomes))


def test_a_punctual_client_is_not_warned_about() -> None:
    outcomes = [outcome(sent=0.009)]
    assert tables.warnings_of(measure.result(outcomes, **facts(1)), outcomes) == []


def test_requests_that_a_server_refused_are_not_counted_as_failed() -> None:
    errors = ["timeout", "refused", "HTTP 429 (overloaded)", "error event (overloaded)"]
    outcomes = [outcome(i, tokens=0, error=error) for i, error in enumerate(errors)]
    shown = dict(tables.rows(measure.result(outcomes, **facts(4))))
    assert (shown["Refused requests"], shown["Failed requests"]) == ("3", "1")


def test_a_run_in_which_nothing_finished_still_has_a_result() -> None:
    result = measure.result([outcome(tokens=0, error="timeout")], **facts(2))
    assert (result["completed"], result["failed"], result["unsent"]) == (0, 1, 1)
    assert result["mean_e2el_ms"] is result["output_throughput"] is None
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert dict(tables.rows(result))["Duration (s)"] == "-"


def test_an_interval_is_the_same_if_it_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [i % 7 + i / 50 for i in range(50)]
    found = []
    for draws in (5000, 700, 1):  # 100 resamples at once, 14, and one by one
        monkeypatch.setattr(figures, "MAX_DRAWS", draws)
        found.append(figures.intervals("ttft", seconds))
    assert found[0] == found[1] == found[2]
