"""The live page: its files by HTTP, and its load."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator

import pytest
from flask import Flask
from flask.testing import FlaskClient

from api.pages.demo import arrivals
from api.schemas.demo import LoadRequest
from app import create_app
from client.report import race
from config import Config
from tests.support import ROOT, SOON, wait_until
from tests.support.fakes import FakeModel, fake_engine, places_taken

HTML = {"Accept": "text/html,application/xhtml+xml"}


@pytest.fixture
def app() -> Iterator[Flask]:
    engine = fake_engine(FakeModel())
    yield create_app(Config(), engine)
    engine.manager.stop()


def test_a_browser_gets_the_page_and_everybody_else_json(client: FlaskClient) -> None:
    page = client.get("/", headers=HTML)
    assert page.mimetype == "text/html"
    assert "script-src 'self'" in page.headers["Content-Security-Policy"]
    assert page.headers["Vary"] == "Accept"
    assert client.get("/").get_json()["status"] == "ok"
    assert client.get("/", headers={"Accept": "*/*"}).get_json()["status"] == "ok"
    for fields in ({"count": 401}, {"rate": -1}, {"count": True}, {"max_tokens": 0}):  # a load is bounded
        assert client.post("/load", json=fields).status_code == 400
    assert client.get("/load").get_json()["active"] is False


def test_the_page_needs_no_key_and_all_that_tells_something_does() -> None:
    client = create_app(Config(api_key="k")).test_client()
    assert client.get("/", headers=HTML).status_code == 200
    assert client.get("/web/live.js").status_code == 200
    assert client.get("/race").status_code == 200
    for path in ("/", "/events", "/load"):
        assert client.get(path).status_code == 401


def test_only_files_of_the_page_are_served() -> None:
    client = create_app(Config()).test_client()
    first = client.get("/web/model.js")
    assert first.mimetype == "text/javascript"
    again = client.get("/web/model.js", headers={"If-None-Match": first.headers["ETag"]})
    assert again.status_code == 304
    for path in ("/web/../app.py", "/web/%2e%2e/app.py", "/web//etc/passwd", "/web/none.js", "/web/demo"):
        assert client.get(path).status_code == 404, path


def test_the_page_names_no_other_host() -> None:
    ours = [p for p in (ROOT / "web").rglob("*") if p.suffix in (".html", ".js", ".css", ".svg")]
    assert len(ours) > 8
    for path in ours:
        text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        text = text.replace("https://github.com/leeoniya/uPlot", "")  # in its comment
        assert not re.search(r"(https?:)?//[a-z0-9-]+\.[a-z]{2,}", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_one_file_groups_the_digits_of_numbers() -> None:
    ours = [path for path in (ROOT / "web").glob("*.js") if not path.name.startswith("uPlot")]
    assert [path.name for path in ours if "toLocaleString" in path.read_text("utf-8")] == ["figures.js"]


def test_a_load_is_the_same_for_the_same_seed_and_poisson() -> None:
    engine = fake_engine(FakeModel())
    params = LoadRequest(count=400, rate=50, min_tokens=5, max_tokens=9, seed=3)
    plan = list(arrivals(engine, params))
    assert plan == list(arrivals(engine, params))
    gaps = [b.pause - a.pause for a, b in itertools.pairwise(plan)]
    assert 0.8 / 50 < sum(gaps) / len(gaps) < 1.2 / 50
    assert {question.num_tokens for question in plan} == {5, 6, 7, 8, 9}
    assert {question.pause for question in arrivals(engine, LoadRequest(count=7))} == {0.0}
    engine.manager.stop()


def test_a_load_counts_its_answers_and_rejections() -> None:
    app = create_app(Config(), fake_engine(FakeModel(), max_batch_size=2, max_queue=6))
    client = app.test_client()
    fields = {"count": 20, "min_tokens": 3, "max_tokens": 6, "seed": 7}
    first = client.post("/load", json=fields).get_json()
    assert (first["total"], first["seed"]) == (20, 7)
    wait_until(lambda: not client.get("/load").get_json()["active"])
    last = client.get("/load").get_json()
    assert last["sent"] == last["done"] + last["failed"] == 20
    assert last["done"] >= 6


@pytest.mark.parametrize("rate", [1e-3, 1e-308])
def test_a_load_that_is_stopped_sends_no_more_and_lets_another_start(client: FlaskClient, rate: float) -> None:
    slow = {"count": 400, "rate": rate}
    assert client.post("/load", json=slow).get_json()["active"] is True
    assert client.post("/load", json=slow).status_code == 429
    assert client.delete("/load").status_code == 200
    wait_until(lambda: not client.get("/load").get_json()["active"])
    assert client.get("/load").get_json()["sent"] == 0
    assert client.post("/load", json={"count": 1, "max_tokens": 8}).status_code == 200


def test_the_requests_of_a_load_are_found_and_cancelled_like_any_other() -> None:
    model, go = FakeModel(), threading.Event()
    model.before = lambda plan: go.wait(SOON) and None  # type: ignore[func-returns-value]
    engine = fake_engine(model, max_batch_size=2)
    app = create_app(Config(), engine)
    client, arrived = app.test_client(), []
    engine.manager.listeners.append(lambda inference: arrived.append(inference.id))
    client.post("/load", json={"count": 4, "max_tokens": 8})
    wait_until(lambda: len(arrived) == 4)
    assert client.get(f"/requests/{arrived[0]}").get_json()["state"] in ("waiting", "running")
    assert client.delete(f"/requests/{arrived[3]}").get_json()["state"] == "cancelled"
    assert app.extensions["service"].registry.open == 0  # no client waits for them, so a shutdown does not either
    go.set()
    wait_until(lambda: not client.get("/load").get_json()["active"])
    reasons = [client.get(f"/requests/{id}").get_json()["finish_reason"] for id in arrived]
    assert reasons == ["length", "length", "length", "cancelled"]
    assert (client.get("/load").get_json()["done"], places_taken(app)) == (3, 0)


def test_a_long_recording_is_cut_at_the_same_moment_for_all() -> None:
    slow = [{"t": 3 + 0.5 * n} for n in range(10)]
    fast = [{"t": 7 + 0.1 * n} for n in range(10)]
    kept, end = race.cut({"slow": slow, "fast": fast}, limit=6)
    assert end == pytest.approx(0.6)
    assert (len(kept["slow"]), len(kept["fast"])) == (2, 6)
    assert race.cut({"slow": slow}, limit=10) == ({"slow": slow}, None)
