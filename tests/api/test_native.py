"""The original's dialect in-process: what /inference and /stats answer."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from calls import Tiny, ask, engine_of, error, raw
from flask import Flask
from flask.testing import FlaskClient

import policies
from app import create_app
from config import Config
from scheduling.pages import PagePool
from tests.support import wait_until
from tests.support.fakes import EOT, FakeModel, fake_engine


def test_the_original_request_gets_the_original_answer_and_more(client: FlaskClient) -> None:
    body = ask(client, prompt="hello ", num_tokens=4).get_json()
    assert body["completion"] == "hello abcd"
    assert body["num_tokens"] == 4
    assert (body["prompt_tokens"], body["cached_tokens"]) == (len("hello "), 0)
    assert (body["finish_reason"], body["stop_reason"]) == ("length", None)
    assert set(body["timings"]) == {
        "queue_s", "prefill_s", "decode_s", "ttft_s", "total_s", "iterations", "batch_mean", "batch_max",
        "drafted", "accepted",
    }  # fmt: skip
    assert body["timings"]["iterations"] == 4
    assert 0 <= body["timings"]["queue_s"] <= body["timings"]["ttft_s"] <= body["timings"]["total_s"]


@pytest.mark.parametrize("value", [10, "10", " 10 ", "+10", 10.0])
def test_num_tokens_may_be_what_int_made_of_it(client: FlaskClient, value: Any) -> None:
    assert ask(client, num_tokens=value).get_json()["num_tokens"] == 10


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "?"]
)
def test_any_content_type_will_do(client: FlaskClient, content_type: str | None) -> None:
    reply = raw(client, b'{"prompt": "x", "num_tokens": 1}', content_type=content_type)
    assert reply.get_json()["completion"] == "xa"


@pytest.mark.parametrize("prompt", ["\0", "a\0b", " ", "\n", "😀", "e\u0301", EOT, f"a{EOT}b{EOT}"])
def test_any_text_is_a_prompt_and_comes_back_whole(client: FlaskClient, prompt: str) -> None:
    assert ask(client, prompt=prompt, num_tokens=2).get_json()["completion"] == prompt + "ab"


def test_unknown_fields_are_ignored_and_named(client: FlaskClient) -> None:
    reply = ask(client, **{"promt": "x", "max_new": 5, "line\nbreak": 1, "é\0": 2})
    assert reply.status_code == 200
    assert reply.headers["X-Ignored-Params"] == "promt, max_new, line?break, ??"
    assert "X-Ignored-Params" not in ask(client).headers


@pytest.mark.parametrize(
    ("path", "names"),
    [("/slots?fail_on_no_slot=0&b=1", "fail_on_no_slot, b"), ("/stats?a=1&b&a=2", "a, b"),
     ("/v1/models?limit=5", "limit"), ("/health?x=\u00e9%0a", "x"), ("/events?last=1&lost=2", "lost"),
     ("/requests/known?verbose=1", "verbose"), ("/metrics?name[]=x", "name[]"), ("/events?last=0", None),
     ("/web/live.js?v=2", None), ("/race?a=1", None), ("/nowhere?a=1", None)],
)  # fmt: skip
def test_parameters_of_the_query_that_no_route_reads_are_named(
    client: FlaskClient, path: str, names: str | None
) -> None:
    client.post("/inference", json={"prompt": "x", "num_tokens": 1}, headers={"X-Request-Id": "known"})
    with client.get(path) as reply:
        assert reply.headers.get("X-Ignored-Params") == names
    both = client.post("/inference?late=1", json={"prompt": "x", "num_tokens": 1, "odd": 2})
    assert both.headers["X-Ignored-Params"] == "odd, late"


def test_a_session_is_ignored_unless_the_eviction_goes_by_it() -> None:
    body = {"prompt": "hi", "num_tokens": 1, "session": "s", "keep_s": 5}
    for evict, ignored in (("lru", "session, keep_s"), ("ttl", "session"), ("least-remaining-turns", "keep_s")):
        engine = fake_engine(pages=PagePool(64, 16, evict=policies.get_eviction(evict)))
        reply = create_app(Config(), engine).test_client().post("/inference", json=body)
        engine.manager.stop()
        assert reply.headers["X-Ignored-Params"] == ignored


def test_a_standing_that_the_policy_does_not_go_by_is_named_as_ignored(client: FlaskClient) -> None:
    assert ask(client, priority=3, slo_s=9).headers["X-Ignored-Params"] == "priority, slo_s"
    client.put("/policy", json={"policy": "dynamic+edf"})
    assert ask(client, priority=3, slo_s=9).headers["X-Ignored-Params"] == "priority"
    client.put("/policy", json={"policy": "dynamic+priority"})
    assert "X-Ignored-Params" not in ask(client, priority=3).headers


@pytest.mark.parametrize(
    "name", ["temperature", "top_k", "top_p", "seed", "stop", "ignore_eos", "timeout_s", "priority", "slo_s", "user"]
)
def test_null_is_as_good_as_absent(client: FlaskClient, name: str) -> None:
    assert ask(client, **{name: None}).get_json()["completion"] == "hiabc"


def test_the_parameters_reach_the_engine(app: Flask, client: FlaskClient) -> None:
    seen: list[Any] = []
    engine = engine_of(app)
    engine.manager.model.before = lambda plan: seen.extend(plan.sequences)  # type: ignore[attr-defined]
    fields = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "seed": -3, "ignore_eos": False}
    ask(client, **fields, user="ann", num_tokens=1)
    assert seen[0].sampling == fields
    assert seen[0].client == "ann"


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 0}, {"temperature": -0.0}, {"temperature": 2}, {"top_k": -1}, {"top_k": 5.0},
     {"top_p": 1}, {"seed": -(2**63)}, {"seed": 2**63 - 1}, {"stop": []}, {"stop": ["a b"] * 4}],
)  # fmt: skip
def test_the_bounds_belong_to_what_is_allowed(client: FlaskClient, fields: dict[str, Any]) -> None:
    assert ask(client, **fields).status_code == 200


def test_a_request_with_a_timeout_ends_with_what_it_has(model: FakeModel, client: FlaskClient) -> None:
    third = threading.Event()
    model.before = lambda plan: len(plan.sequences[0].output_ids) == 2 and not third.wait(60) and None
    body = ask(client, num_tokens=900, timeout_s=0.2).get_json()
    third.set()
    assert body["completion"] == "hi" + "ab"[: body["num_tokens"]]  # both, unless the machine is slow
    assert body["finish_reason"] == "length"
    assert body["stop_reason"] == "timeout"
    assert body["timings"]["total_s"] >= 0.2
    assert ask(client, num_tokens=3, timeout_s=60).get_json()["completion"] == "hiabc"


def test_the_id_of_a_request_is_echoed_or_made(client: FlaskClient) -> None:
    given = {"X-Request-Id": "a-B.c:1_"}
    assert client.get("/stats", headers=given).headers["X-Request-Id"] == "a-B.c:1_"
    for bad in ("a b", "x" * 129, "<script>", ""):
        made = client.get("/nowhere", headers={"X-Request-Id": bad}).headers["X-Request-Id"]
        assert made != bad
        assert len(made) == 32


ORIGINAL = ["latency-per-token", "throughput", "total-tokens-handled", "total-elapsed-time"]
ADDED = ["requests", "requests-failed", "requests-cancelled", "requests-running", "requests-waiting",
         "throughput-wall", "latency-p50", "latency-p90", "latency-p99", "ttft-p50", "ttft-p99",
         "tpot-p50", "tpot-p99", "itl-p50", "itl-p99", "policy", "engine"]  # fmt: skip
ENGINE = ["model", "device", "dtype", "iterations", "uptime_s", "batch_stats", "slot_steps", "kv"]


def test_stats_before_the_first_request_are_null_or_zero(fresh: Flask) -> None:
    client = fresh.test_client()
    for _ in range(2):
        reply = client.get("/stats")
        stats = reply.get_json()
        assert reply.status_code == 200
        assert list(stats)[:4] == ORIGINAL
        assert [stats[key] for key in ORIGINAL] == [None, None, 0, 0]
        assert set(ORIGINAL + ADDED) <= set(stats)
        assert set(ENGINE) <= set(stats["engine"])


def test_stats_keep_the_formulas_of_the_original(fresh: Flask) -> None:
    client = fresh.test_client()
    times = {n: ask(client, num_tokens=n).get_json()["timings"]["total_s"] for n in (2, 5, 9)}
    stats = client.get("/stats").get_json()
    assert stats["total-tokens-handled"] == 16
    assert stats["total-elapsed-time"] == pytest.approx(sum(times.values()))
    assert stats["throughput"] == pytest.approx(16 / sum(times.values()))
    assert stats["latency-per-token"] == pytest.approx(sum(t / n for n, t in times.items()) / 3)
    assert stats["requests"] == 3
    assert stats["throughput-wall"] > 0
    assert stats["engine"]["batch_stats"][0] | {"seconds": 0} == {"batch_size": 1, "count": 16, "seconds": 0}
    assert set(stats["engine"]["slot_steps"]) == {"useful", "padding", "held", "idle", "recomputed", "rejected"}


def test_the_table_by_length_is_a_csv(fresh: Flask) -> None:
    client = fresh.test_client()
    for n in (7, 2, 7):
        ask(client, num_tokens=n)
    reply = client.get("/stats/token_data.csv")
    assert reply.mimetype == "text/csv"
    rows = [line.split(",") for line in reply.text.splitlines()]
    assert [row[0] for row in rows] == ["2", "7"]
    assert all(float(row[1]) > 0 for row in rows)


def test_a_seed_repeats_and_temperature_0_is_greedy(tiny: Tiny) -> None:
    client, _ = tiny
    texts = [ask(client, num_tokens=20, seed=seed).get_json()["completion"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    greedy = [ask(client, num_tokens=20, temperature=0, seed=s).get_json()["completion"] for s in (1, 2)]
    greedy.append(ask(client, num_tokens=20, temperature=-0.0).get_json()["completion"])
    assert len({*greedy}) == 1
    assert ask(client, num_tokens=20, top_k=1, seed=3).get_json()["completion"] == greedy[0]
    assert ask(client, num_tokens=20, top_p=1e-9, seed=4).get_json()["completion"] == greedy[0]
    drawn = {ask(client, num_tokens=20).get_json()["completion"] for _ in range(3)}
    assert len(drawn) == 3


def test_the_context_of_a_real_model_ends_where_it_says(tiny: Tiny) -> None:
    client, engine = tiny
    prompt = "the " * 400
    length = len(engine.tokenizer.encode(prompt))
    message = error(ask(client, prompt=prompt, num_tokens=1000))["message"]
    room = engine.context - length
    assert f"{length:,} tokens and num_tokens is 1,000" in message
    assert f"at most {room:,} tokens" in message
    body = ask(client, prompt=prompt, num_tokens=room, temperature=0).get_json()
    assert body["num_tokens"] == room
    error(ask(client, prompt=prompt, num_tokens=room + 1))


def test_a_timeout_of_a_real_request_frees_its_pages(tiny: Tiny) -> None:
    client, engine = tiny
    body = ask(client, num_tokens=1000, timeout_s=0.01).get_json()
    assert body["finish_reason"] == "length"
    assert 0 <= body["num_tokens"] < 1000
    pages = engine.manager.pages
    assert pages is not None
    wait_until(lambda: pages.used == 0)


def test_stats_tell_about_a_real_engine(tiny: Tiny) -> None:
    client, _ = tiny
    ask(client)
    stats = client.get("/stats").get_json()
    json.dumps(stats, allow_nan=False)
    assert stats["policy"] == "dynamic"
    assert stats["engine"]["device"] == "cpu"
    assert {"pages_total", "pages_used", "query_tokens", "hit_tokens"} <= set(stats["engine"]["kv"])
