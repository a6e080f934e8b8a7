"""Looking in: health, readiness, slots, what became of a request, the log; and that no answer waits for the engine."""

from __future__ import annotations

import io
import json
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from calls import connected, engine_of, service
from flask import Flask
from flask.testing import FlaskClient

from api.hooks.admission import take_more
from api.http import registry as visiting
from api.http.errors import ApiError
from api.http.registry import RequestRegistry
from api.http.watcher import Watcher
from api.service import GPU_STALL_SECONDS, STALL_SECONDS
from app import create_app
from config import Config
from observe.queued_log import QueuedLog
from serving.places import Places
from tests.support import SOON, in_background, wait_until
from tests.support.fakes import FakeModel, fake_engine, places_taken


@pytest.fixture
def app(model: FakeModel) -> Iterator[Flask]:
    few = {"max_batch_size": 2, "max_queue": 4}
    yield from connected(create_app(Config(policy="dynamic", **few)), fake_engine(model, **few))


def ask(app: Flask, id: str = "", path: str = "/inference", **fields: Any) -> Any:
    body = {"prompt": "hi", "num_tokens": 3} | fields
    return app.test_client().post(path, json=body, headers={"X-Request-Id": id} if id else {})


def in_the_loop(app: Flask) -> int:
    manager = engine_of(app).manager
    return manager.waiting + manager.running


# ---------------------------------------------------------------- health


def test_ready_is_not_health_when_the_server_drains(app: Flask, client: FlaskClient) -> None:
    service(app).draining = True
    for path in ("/ready", "/health/ready"):
        reply = client.get(path)
        assert (reply.status_code, reply.get_json()["status"]) == (503, "draining")
        assert reply.headers["Retry-After"] == "1"
    assert client.get("/health").status_code == 200
    assert client.get("/health/live").status_code == 200
    refusal = ask(app)
    assert (refusal.status_code, refusal.get_json()["error"]["type"]) == (503, "unavailable_error")
    tgi = client.post("/generate", json={"inputs": "x"})
    assert (tgi.status_code, tgi.get_json()["error_type"]) == (503, "healthcheck")


def test_a_gpu_stalls_sooner(app: Flask) -> None:
    assert service(app).stall_seconds == STALL_SECONDS
    object.__setattr__(service(app).engine, "device", "cuda:0")
    assert service(app).stall_seconds == GPU_STALL_SECONDS


def test_no_answer_waits_for_the_engine(app: Flask, client: FlaskClient, model: FakeModel) -> None:
    model.gate.clear()
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(ask, app, f"r{i}") for i in range(6)]
        wait_until(lambda: places_taken(app) == 6 and model.plans)
        for path in ("/", "/health", "/ready", "/health/live", "/stats", "/metrics", "/slots",
                     "/requests/r0", "/openapi.json", "/docs", "/v1/models", "/info"):  # fmt: skip
            assert client.get(path).status_code == 200, path
        assert ask(app).status_code == 429
        assert client.delete("/requests/r5").status_code == 200
        model.gate.set()
    assert sorted(f.result().status_code for f in waiting) == [200] * 5 + [499]


# ---------------------------------------------------------------- slots


def test_slots_say_what_each_does(app: Flask, client: FlaskClient, model: FakeModel) -> None:
    idle = client.get("/slots").get_json()
    assert [slot["id"] for slot in idle] == [0, 1]
    assert {slot["state"] for slot in idle} == {"idle"}
    model.before = lambda plan: time.sleep(0.03)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(ask, app, id, num_tokens=1000) for id in ("a", "b")]
        wait_until(lambda: {slot["is_processing"] for slot in client.get("/slots").get_json()} == {True})
        slots = {slot["id_task"]: slot for slot in client.get("/slots").get_json()}
        assert set(slots) == {"a", "b"}
        assert slots["b"]["n_ctx"] == 1024
        assert slots["b"]["prompt_tokens"] == 2
        assert slots["b"]["params"]["max_tokens"] == 1000
        assert slots["b"]["state"] in ("prefill", "decode")
        after = slots["b"]["next_token"]
        assert after["n_decoded"] + after["n_remain"] == 1000
        for id in ("a", "b"):
            client.delete(f"/requests/{id}")
        assert {job.result().status_code for job in jobs} == {499}


# ---------------------------------------------------------------- what became of a request


def test_a_timeline_adds_up(app: Flask, client: FlaskClient) -> None:
    began = time.time()
    assert ask(app, "mine", num_tokens=5).get_json()["id"] == "mine"
    record = client.get("/requests/mine").get_json()
    assert (record["id"], record["state"], record["finish_reason"]) == ("mine", "finished", "length")
    assert (record["prompt_tokens"], record["output_tokens"], record["cached_tokens"]) == (2, 5, 0)
    moments = [record[f"{name}_at"] for name in ("arrived", "scheduled", "first_token", "finished")]
    assert moments == sorted(moments)
    assert began - 1 < moments[0] < moments[3] < time.time() + 1
    first, last = record["iterations"]
    assert last - first + 1 == 5
    assert record["batch"] == {"mean": 1, "max": 1}
    waited = sum(w["seconds"] for w in record["waited"])
    assert waited == pytest.approx(moments[1] - moments[0], abs=1e-5)
    assert "hi" not in client.get("/requests/mine").text.replace("this", "")


def test_who_waits_is_told_so_and_then_why(app: Flask, client: FlaskClient, model: FakeModel) -> None:
    model.gate.clear()
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(ask, app, f"r{i}", num_tokens=4) for i in range(2)]
        wait_until(lambda: in_the_loop(app) == 2 and model.plans)
        jobs.append(pool.submit(ask, app, "late"))
        wait_until(lambda: (service(app).registry.find("late") or {}).get("arrived_at"))
        assert client.get("/requests/late").get_json()["state"] == "waiting"
        assert client.get("/requests/r0").get_json()["state"] in ("running", "waiting")
        model.gate.set()
        assert {job.result().status_code for job in jobs} == {200}
    record = client.get("/requests/late").get_json()
    reasons = {w["reason"]: w for w in record["waited"]}
    assert "slots_full" in reasons, record
    assert sum(w["seconds"] for w in record["waited"]) == pytest.approx(
        record["scheduled_at"] - record["arrived_at"], abs=1e-5
    )
    assert reasons["slots_full"]["iterations"] >= 1


def test_who_still_waits_is_told_why_and_for_how_many_steps(app: Flask, client: FlaskClient, model: FakeModel) -> None:
    steps = threading.Semaphore(0)
    model.before = lambda plan: steps.acquire(timeout=60) and None  # type: ignore[func-returns-value]
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, app, f"r{i}", num_tokens=5) for i in range(4)]
        wait_until(lambda: in_the_loop(app) == 4 and model.plans)
        steps.release(3)
        wait_until(lambda: model.plans == 4)
        records = [client.get(f"/requests/r{i}").get_json() for i in range(4)]
        waiting = [record for record in records if record["state"] == "waiting"]
        steps.release(100)
        assert {f.result().status_code for f in asked} == {200}
    assert len(waiting) == 2  # two have the slots
    now = time.time()
    for record in waiting:
        reasons = {w["reason"]: w for w in record["waited"]}
        assert reasons["slots_full"]["iterations"] >= 2
        total = sum(w["seconds"] for w in record["waited"])
        assert 0 < total <= now - record["arrived_at"]


def test_the_same_id_twice_is_two_requests_and_the_last_is_found(app: Flask, client: FlaskClient) -> None:
    ids = [ask(app, "twin", num_tokens=n).get_json()["id"] for n in (2, 3, 4)]
    assert len(set(ids)) == 3
    assert client.get("/requests/twin").get_json()["output_tokens"] == 4
    assert client.get(f"/requests/{ids[1]}").get_json()["output_tokens"] == 3
    assert service(app).meters._open == {}


def test_choices_are_one_request(app: Flask, client: FlaskClient) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 3}
    reply = client.post("/v1/completions", json=body, headers={"X-Request-Id": "many"})
    assert len(reply.get_json()["choices"]) == 4
    record = client.get("/requests/many").get_json()
    assert (record["state"], len(record["choices"])) == ("finished", 4)
    assert {choice["output_tokens"] for choice in record["choices"]} == {3}
    assert client.get(f"/requests/{reply.get_json()['id']}").status_code == 200


def test_only_the_last_thousand_are_kept(app: Flask, client: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visiting, "KEPT", 3)
    for i in range(6):
        ask(app, f"r{i}")
    known = [client.get(f"/requests/r{i}").status_code for i in range(6)]
    assert known == [404, 404, 404, 200, 200, 200]
    kept = service(app).registry
    assert (len(kept._done), len(kept._latest), len(kept._of), kept.open) == (3, 3, 0, 0)


def test_an_unknown_request_is_404(client: FlaskClient) -> None:
    for method in ("GET", "DELETE"):
        reply = client.open("/requests/nobody", method=method)
        assert reply.status_code == 404
        assert "'nobody'" in reply.get_json()["error"]["message"]


def test_delete_ends_all_of_an_id_and_can_be_repeated(app: Flask, client: FlaskClient, model: FakeModel) -> None:
    model.gate.clear()
    ask_for_two = {"prompt": "x", "n": 2, "max_tokens": 50}
    with in_background(lambda: ask(app, "victim", "/v1/completions", **ask_for_two)) as reply:
        wait_until(lambda: model.plans)
        for _ in range(2):
            answer = client.delete("/requests/victim")
            assert answer.get_json() == {"id": "victim", "state": "cancelled"}
        model.gate.set()
    assert reply[0].status_code == 499
    assert reply[0].get_json()["error"]["type"] == "cancelled"
    wait_until(lambda: client.get("/requests/victim").get_json()["state"] == "finished")
    assert client.delete("/requests/victim").get_json()["state"] == "cancelled"
    wait_until(lambda: client.get("/stats").get_json()["requests-cancelled"] == 2)
    ask(app, "done")
    assert client.delete("/requests/done").get_json() == {"id": "done", "state": "finished"}


# ---------------------------------------------------------------- places


def test_further_places_belong_to_the_same_request(app: Flask) -> None:
    with app.test_request_context("/inference", method="POST"):
        app.preprocess_request()
        take_more(service(app), 5)
        assert places_taken(app) == 6
        with pytest.raises(ApiError, match="6 requests queued or running, this one adds 2, limit 6"):
            take_more(service(app), 2)
    assert (places_taken(app), service(app).registry.open) == (0, 0)


def test_a_request_leaves_once() -> None:
    registry, places = RequestRegistry(Watcher()), Places(1)
    context = registry.enter("a", places.lend())
    assert places.lend() is None
    assert [registry.leave(context) for _ in range(3)] == [True, False, False]
    assert (places.taken, registry.open) == (0, 0)


@pytest.mark.full
def test_a_hundred_thousand_refused_requests_leave_nothing_behind() -> None:
    registry, places = RequestRegistry(Watcher()), Places(1)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for n in range(100_000):
            context = registry.enter(f"request-{n}", places.lend())
            registry.rename(context, f"renamed-{n}")
            registry.leave(context)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 100_000  # bytes: less than one for each
    assert registry.find("renamed-99999") is None


def test_a_refused_request_does_not_hide_a_finished_one_with_its_id(app: Flask, client: FlaskClient) -> None:
    ask(app, "twice")
    refused = client.post("/inference", json={}, headers={"X-Request-Id": "twice"})
    assert refused.status_code == 400
    assert client.get("/requests/twice").get_json()["state"] == "finished"


# ---------------------------------------------------------------- the log


def logged(app: Flask) -> io.StringIO:
    """Let the app write its log into what is returned."""
    stream = io.StringIO()
    service(app).serves = True
    service(app).access_log = QueuedLog(stream)
    service(app).access_log.start()
    return stream


def lines(app: Flask, stream: io.StringIO) -> list[dict[str, Any]]:
    service(app).access_log.flush(SOON)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_probes_and_the_pages_files_are_logged_only_if_they_fail(app: Flask, client: FlaskClient) -> None:
    stream = logged(app)
    for path in ("/health", "/ready", "/metrics", "/web/model.js", "/web/none.js", "/load", "/policy"):
        client.get(path)
    client.delete("/load")
    assert [(line["route"], line["status"]) for line in lines(app, stream)] == [
        ("/web/<path:name>", 404), ("/policy", 200), ("/load", 200)
    ]  # fmt: skip


def test_failing_probes_are_a_line_when_they_begin_to_fail_and_one_when_that_ends(
    app: Flask, client: FlaskClient
) -> None:
    stream, engine = logged(app), service(app).engine
    for now in (None, engine):
        service(app).engine = now
        for path in ("/ready", "/ready", "/health", "/health/live", "/ready"):
            client.get(path)
    assert [(line["route"], line["status"]) for line in lines(app, stream)] == [
        ("/ready", 503), ("/health", 503), ("/ready", 200), ("/health", 200)
    ]  # fmt: skip


def test_each_request_is_a_line_of_lengths_and_times(app: Flask, client: FlaskClient) -> None:
    stream = logged(app)
    ask(app, "one", prompt="the secret", num_tokens=4)
    ask(app, "two", num_tokens=0)
    client.get("/stats?api_key=secret", headers={"X-Request-Id": "three"})
    client.get("/secret", headers={"X-Request-Id": "four"})
    client.get("/health")
    found = {line["id"]: line for line in lines(app, stream)}
    assert list(found) == ["one", "two", "three", "four"]
    one = found["one"]
    assert (one["method"], one["route"], one["status"]) == ("POST", "/inference", 200)
    assert (one["prompt_tokens"], one["output_tokens"], one["finish_reason"]) == (10, 4, "length")
    assert one["seconds"] >= one["ttft_s"] >= one["queue_s"] >= 0
    assert one["bytes_in"] > 20
    assert (found["two"]["status"], found["two"]["error"]) == (400, "invalid_request_error")
    assert (found["four"]["status"], found["four"]["route"]) == (404, "other")
    assert "secret" not in stream.getvalue()


def test_a_stream_is_logged_when_it_ends(app: Flask) -> None:
    stream = logged(app)
    reply = ask(app, "s", stream=True, num_tokens=5)
    assert lines(app, stream) == []
    assert b"[DONE]" in reply.data
    reply.close()
    (line,) = lines(app, stream)
    assert (line["status"], line["streams"], line["output_tokens"]) == (200, True, 5)
