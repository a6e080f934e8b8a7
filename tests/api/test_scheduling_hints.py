"""Who is first, over HTTP: the orders that go by priority, deadline, client and length, in every dialect."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from dialects import Body, Dialect, every_dialect, post

from api.service import Service
from app import create_app
from config import Config
from tests.support import wait_until
from tests.support.fakes import FakeModel, fake_engine


class OneAtATime:
    """A server with one slot that is taken until `go`, and the order in which requests get it then."""

    def __init__(self, policy: str) -> None:
        self.order: list[str] = []
        self.go = threading.Event()
        model = FakeModel()
        model.before = self.see
        app = create_app(Config(max_queue=32), fake_engine(model, policy=policy, max_queue=32))
        self.client = app.test_client
        self.service: Service = app.extensions["service"]
        assert self.service.engine is not None
        self.manager = self.service.engine.manager

    def see(self, plan: Any) -> None:
        (seq,) = plan.sequences
        if seq.is_prefilling:
            self.order.append(seq.id)
        assert self.go.wait(60)

    def send(self, dialect: Dialect, n: int, more: Body, id: str) -> int:
        client = self.client()
        client.environ_base["HTTP_X_REQUEST_ID"] = id
        return post(client, dialect, more, limit=n).status_code

    def serve(self, dialect: Dialect, *asked: tuple[int, Body]) -> str:
        """Send requests a, b, c ... one after the other while the slot is taken; return the order of their service."""
        with ThreadPoolExecutor(len(asked) + 1) as pool:
            sent = [pool.submit(self.send, dialect, 1, {}, "first")]
            wait_until(lambda: self.order == ["first"])
            for i, (n, more) in enumerate(asked):
                sent.append(pool.submit(self.send, dialect, n, more, "abcdefgh"[i]))
                wait_until(lambda i=i: self.manager.waiting == i + 1)
            self.go.set()
            assert [done.result() for done in sent] == [200] * len(sent)
        return "".join(self.order[1:])


@pytest.fixture
def serve(request: pytest.FixtureRequest) -> Iterator[Callable[..., str]]:
    server = OneAtATime(f"nobatch+{request.param}")
    yield server.serve
    server.go.set()
    server.manager.stop()


@every_dialect
@pytest.mark.parametrize("serve", ["priority"], indirect=True)
def test_the_lower_priority_number_is_served_first(serve: Callable[..., str], dialect: Dialect) -> None:
    asked = [(2, {"priority": 2}), (2, {}), (2, {"priority": -1}), (2, {"priority": 2})]
    assert serve(dialect, *asked) == "cbad"


@every_dialect
@pytest.mark.parametrize("serve", ["edf"], indirect=True)
def test_the_earliest_deadline_is_served_first(serve: Callable[..., str], dialect: Dialect) -> None:
    """Who names none is given the ten seconds of the order's own."""
    assert serve(dialect, (2, {"slo_s": 500}), (2, {"slo_s": 60}), (2, {}), (2, {"slo_s": 2})) == "dcba"


@every_dialect
@pytest.mark.parametrize("serve", ["vtc"], indirect=True)
def test_a_client_with_few_requests_need_not_wait_for_one_with_many(
    serve: Callable[..., str], dialect: Dialect
) -> None:
    many, few = {"user": "many"}, {"user": "few"}
    assert serve(dialect, (9, many), (9, many), (9, many), (2, few), (2, few)) == "adebc"


@every_dialect
@pytest.mark.parametrize("serve", ["sjf"], indirect=True)
def test_the_shortest_is_served_first(serve: Callable[..., str], dialect: Dialect) -> None:
    assert serve(dialect, (30, {}), (3, {}), (10, {})) == "bca"


@every_dialect
@pytest.mark.parametrize("serve", ["program-fcfs"], indirect=True)
def test_the_program_that_began_first_is_served_first(serve: Callable[..., str], dialect: Dialect) -> None:
    assert serve(dialect, (2, {"program": "p"}), (2, {}), (2, {"session": "p"})) == "acb"
