"""What /metrics shows: frozen names, labels and buckets, and figures worked out by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from calls import ask, connected, engine_of
from flask import Flask
from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families as parse

from app import create_app
from config import Config
from observe.meters import PER_TOKEN, TTFT
from scheduling.iteration import Experts, Plan, SlotSteps
from tests.support import in_background, wait_until
from tests.support.fakes import FakeModel, fake_engine

ONE = {"engine", "model_name"}
NAMES = {
    "gauge": {
        "vllm:num_requests_running": ONE, "vllm:num_requests_waiting": ONE, "vllm:kv_cache_usage_perc": ONE,
        "vllm:cache_config_info": ONE | {"block_size", "num_gpu_blocks", "enable_prefix_caching"},
        "eb_policy_info": {"policy"}, "eb_info": {"device", "dtype", "quantize", "kv_dtype", "linear"}, "eb_engine_up": set(), "eb_slot_cap": set(), "eb_last_iteration_age_seconds": set(),
        "eb_slots": set(), "eb_forms_kept": set(), "eb_event_viewers": set(), "eb_adapters": set(), "eb_adapter_bytes": set(), "eb_batches": {"status"}, "eb_batch_files": set(), "eb_batch_file_bytes": set(),
    },
    "counter": {
        "vllm:prompt_tokens": ONE, "vllm:generation_tokens": ONE, "vllm:num_preemptions": ONE,
        "vllm:prefix_cache_queries": ONE, "vllm:prefix_cache_hits": ONE,
        "vllm:spec_decode_num_drafts": ONE, "vllm:spec_decode_num_draft_tokens": ONE,
        "vllm:spec_decode_num_accepted_tokens": ONE, "vllm:spec_decode_num_accepted_tokens_per_pos": set(),
        "vllm:request_success": ONE | {"finished_reason"}, "eb_slot_steps": {"kind"},
        "eb_http_requests": {"route", "status"}, "eb_rejected": {"reason"}, "eb_cancelled": {"where"},
        "eb_mask_seconds": set(), "eb_experts": {"kind"}, "eb_forms": {"result"}, "eb_step_failures": set(), "eb_policy_failures": set(), "eb_step_retries": set(), "eb_out_of_memory": set(),
        "eb_engine_deaths": set(), "eb_ignored_params": set(),
        "eb_events_dropped": set(), "eb_adapter_loads": set(), "eb_adapter_evictions": set(), "eb_deduplicated_requests": set(), "eb_deduplicated_tokens": set(), "eb_batch_lines": {"result"},
    },
    "histogram": {
        "vllm:time_to_first_token_seconds": ONE, "vllm:inter_token_latency_seconds": ONE,
        "vllm:time_per_output_token_seconds": ONE, "vllm:request_time_per_output_token_seconds": ONE,
        "vllm:e2e_request_latency_seconds": ONE, "vllm:request_queue_time_seconds": ONE,
        "vllm:request_prefill_time_seconds": ONE, "vllm:request_decode_time_seconds": ONE,
        "vllm:request_inference_time_seconds": ONE, "vllm:request_prompt_tokens": ONE,
        "vllm:request_generation_tokens": ONE, "vllm:request_params_max_tokens": ONE,
        "vllm:request_params_n": ONE, "vllm:request_max_num_generation_tokens": ONE,
        "vllm:iteration_tokens_total": ONE, "eb_iteration_seconds": {"phase"}, "eb_batch_size": set(),
        "eb_queue_wait_seconds": {"reason"},
    },
}  # fmt: skip


@pytest.fixture
def app(model: FakeModel) -> Iterator[Flask]:
    yield from connected(create_app(Config(policy="dynamic")), fake_engine(model))


def scrape(client: FlaskClient) -> dict[str, Any]:
    return {family.name: family for family in parse(client.get("/metrics").text)}


def value(client: FlaskClient, name: str, **labels: str) -> float:
    """Return one sample; labels that are not asked for do not matter."""
    for family in parse(client.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    return 0.0


def test_names_kinds_and_labels_are_frozen(client: FlaskClient) -> None:
    ask(client)
    ask(client, num_tokens=0)
    found: dict[str, dict[str, set[str]]] = {}
    for family in scrape(client).values():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found.setdefault(family.type, {})[family.name] = labels
    for kind, names in NAMES.items():
        assert found[kind] == names


def test_the_values_of_labels_are_frozen_too(client: FlaskClient) -> None:
    ask(client)
    labels = {
        sample.name: {
            name: {s.labels[name] for s in family.samples if name in s.labels}
            for name in sample.labels
            if name not in ("le", "engine", "model_name")
        }
        for family in scrape(client).values()
        for sample in family.samples
    }
    assert labels["vllm:request_success_total"]["finished_reason"] == {"stop", "length", "abort"}
    assert labels["eb_iteration_seconds_count"]["phase"] == {"prefill", "decode", "mixed"}
    assert labels["eb_cancelled_total"]["where"] == {"queued", "prefill", "decode"}
    assert labels["eb_slot_steps_total"]["kind"] == set(SlotSteps._fields)
    assert labels["eb_queue_wait_seconds_count"]["reason"] == {
        "slots_full", "token_budget", "kv_full", "policy_order", "window",
    }  # fmt: skip
    assert labels["eb_policy_info"]["policy"] == {"dynamic"}


def test_buckets_are_frozen(client: FlaskClient) -> None:
    families = scrape(client)

    def bounds(name: str) -> list[float]:
        return [float(s.labels["le"]) for s in families[name].samples if s.name.endswith("_bucket")]

    seconds = bounds("vllm:time_to_first_token_seconds")
    assert seconds[:4] == [0.001, 0.005, 0.01, 0.02]
    assert seconds[-3:] == [640, 2560, float("inf")]
    assert bounds("vllm:inter_token_latency_seconds")[:5] == [0.0005, 0.001, 0.002, 0.005, 0.01]
    assert bounds("vllm:e2e_request_latency_seconds")[-4:-1] == [960, 1920, 7680]
    assert bounds("vllm:iteration_tokens_total")[:4] == [1, 8, 16, 32]
    assert bounds("vllm:iteration_tokens_total")[-2] == 16384
    assert bounds("vllm:request_prompt_tokens")[-3:] == [50_000, 100_000, float("inf")]
    assert bounds("eb_batch_size")[:4] == [1, 2, 4, 8]
    assert list(TTFT) == sorted(TTFT)
    assert list(PER_TOKEN) == sorted(PER_TOKEN)


def test_buckets_are_cumulative_and_the_last_is_the_count(client: FlaskClient) -> None:
    ask(client)
    for family in (family for family in scrape(client).values() if family.type == "histogram"):
        counts: dict[Any, list[float]] = {}
        for sample in family.samples:  # the buckets of each series, then its count
            if sample.name.endswith(("_bucket", "_count")):
                labels = frozenset((k, v) for k, v in sample.labels.items() if k != "le")
                counts.setdefault(labels, []).append(sample.value)
        assert all(found == sorted(found) and found[-1] == found[-2] for found in counts.values()), family.name


def test_the_format_is_that_of_prometheus(client: FlaskClient) -> None:
    ask(client)
    plain = client.get("/metrics")
    assert plain.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    names = [family.name for family in parse(plain.text)]
    assert len(names) == len(set(names))


def series(text: str) -> set[str]:
    """Return the names of the samples, which a format may write otherwise than those of their families."""
    return set(re.findall(r"^([a-z][\w:]*)[{ ]", text, re.M))


def test_there_are_metrics_while_the_model_loads_and_many_servers_in_a_process() -> None:
    for name in ("one", "two"):
        client = create_app(Config(model=name)).test_client()
        assert value(client, "eb_engine_up") == 0
        assert value(client, "vllm:num_requests_running", model_name=name) == 0
        assert f'model_name="{name}"' in client.get("/metrics").text


def test_no_label_has_a_value_from_a_client(client: FlaskClient) -> None:
    headers = {"X-Request-Id": "mine-alone"}
    client.get("/secret-path", headers=headers)
    client.get("/requests/secret-id", headers=headers)
    client.open("/stats", method="SECRET")
    ask(client, prompt="secret prompt", user="secret", **{"secret-field": 1})
    text = client.get("/metrics").text
    assert "secret" not in text.lower()
    assert "mine-alone" not in text
    assert value(client, "eb_http_requests_total", route="other", status="404") == 1


def test_requests_and_tokens_are_counted(client: FlaskClient) -> None:
    for i in range(3):
        ask(client, num_tokens=5, prompt="four", **({"stop": "c"} if i else {}))
    assert value(client, "vllm:generation_tokens_total") == 5 + 3 + 3
    assert value(client, "vllm:prompt_tokens_total") == 12
    assert value(client, "vllm:request_success_total", finished_reason="length") == 1
    assert value(client, "vllm:request_success_total", finished_reason="stop") == 2
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_params_n",
                 "request_queue_time_seconds", "request_time_per_output_token_seconds"):  # fmt: skip
        assert value(client, f"vllm:{name}_count") == 3, name
    assert value(client, "vllm:inter_token_latency_seconds_count") == 4 + 2 + 2
    assert value(client, "vllm:request_generation_tokens_sum") == 11
    assert value(client, "vllm:request_params_max_tokens_sum") == 15
    assert value(client, "eb_slot_steps_total", kind="useful") == 11
    assert value(client, "eb_slot_steps_total", kind="idle") == 11 * 7
    assert value(client, "eb_iteration_seconds_count", phase="prefill") == 3
    assert value(client, "eb_iteration_seconds_count", phase="decode") == 8
    assert value(client, "eb_batch_size_count") == 11
    assert value(client, "eb_http_requests_total", route="/inference", status="200") == 3


def test_running_requests_are_shown(model: FakeModel, client: FlaskClient) -> None:
    model.gate.clear()
    with in_background(lambda: ask(client)):
        wait_until(lambda: model.plans)
        assert value(client, "vllm:num_requests_running") == 1
        assert value(client, "vllm:num_requests_waiting") == 0
        assert value(client, "eb_engine_up") == 1
        assert value(client, "eb_last_iteration_age_seconds") > 0
        model.gate.set()
    assert value(client, "vllm:num_requests_running") == 0


def test_refusals_failures_and_ignored_fields_are_counted(model: FakeModel, client: FlaskClient) -> None:
    ask(client, num_tokens=0)
    client.post("/inference", data=b"x", headers={"Content-Encoding": "gzip"})
    client.post("/inference", data=b"{}", headers={"Sec-Fetch-Site": "cross-site"})
    ask(client, what=1, ever=2)
    reasons = ("invalid", "media_type", "cross_site", "queue_full")
    counts = [value(client, "eb_rejected_total", reason=reason) for reason in reasons]
    assert counts == [1, 1, 1, 0]
    assert value(client, "eb_ignored_params_total") == 2

    def fail(plan: Any) -> None:
        if plan.number:  # the engine itself is sound: a token of nobody's comes
            raise RuntimeError

    model.before = fail
    assert ask(client).status_code == 500
    assert value(client, "eb_step_failures_total") == 1
    assert value(client, "vllm:request_success_total", finished_reason="abort") == 1
    totals = client.get("/stats").get_json()["http"]
    assert totals["5xx"] == 1
    assert totals["4xx"] == 2  # the page of another site was not even asked what it wanted
    assert totals["received"] == sum(totals[k] for k in ("2xx", "4xx", "5xx", "cancelled"))


def test_observers_that_raise_affect_no_request(
    app: Flask, client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise KeyError

    engine = engine_of(app)
    engine.manager.observers.insert(0, fail)
    engine.manager.listeners.insert(0, fail)
    assert ask(client).get_json()["completion"] == "hiabc"
    assert value(client, "vllm:generation_tokens_total") == 3


def test_a_model_name_with_quotes_is_escaped() -> None:
    app = create_app(Config(model='a"b\\c\nd'))
    text = app.test_client().get("/metrics").text
    names = {s.labels["model_name"] for f in parse(text) for s in f.samples if "model_name" in s.labels}
    assert names == {'a"b\\c\nd'}
    assert re.search(r"\n# TYPE eb_slots gauge\n", text)


def test_the_time_that_steps_waited_for_masks_is_counted(client: FlaskClient, model: FakeModel) -> None:
    def waits(plan: Plan) -> None:
        plan.mask_seconds = 0.25

    ask(client)
    assert value(client, "eb_mask_seconds_total") == 0
    model.before = waits
    ask(client, num_tokens=3)
    assert value(client, "eb_mask_seconds_total") == 0.75


def test_the_experts_that_steps_read_are_counted_beside_those_that_they_did_not(
    client: FlaskClient, model: FakeModel
) -> None:
    def reads(plan: Plan) -> None:
        plan.experts = Experts(6, 16)

    model.before = reads
    ask(client, num_tokens=3)
    assert value(client, "eb_experts_total", kind="read") == 18
    assert value(client, "eb_experts_total", kind="unread") == 30
