"""Who is first, over HTTP: the orders that go by priority, deadline, client and length, in every dialect."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from dialects import Body, Dialect, every_dialect, post

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
        engine = fake_engine(model, policy=policy, max_queue=32)
        self.client, self.manager = create_app(Config(max_queue=32), engine).test_client, engine.manager

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


MANY, FEW = {"user": "many"}, {"user": "few"}
ORDERS: dict[str, tuple[list[tuple[int, Body]], str]] = {
    "priority": ([(2, {"priority": n} if n else {}) for n in (2, 0, -1, 2)], "cbad"),  # the lower first
    "edf": ([(2, {"slo_s": 500}), (2, {"slo_s": 60}), (2, {}), (2, {"slo_s": 2})], "dcba"),  # who names none has 10 s
    "vtc": ([(9, MANY), (9, MANY), (9, MANY), (2, FEW), (2, FEW)], "adebc"),  # few requests need not wait for many
    "sjf": ([(30, {}), (3, {}), (10, {})], "bca"),
    "program-fcfs": ([(2, {"program": "p"}), (2, {}), (2, {"session": "p"})], "acb"),
}


@pytest.mark.parametrize("order", ORDERS)
@every_dialect
def test_who_is_first_is_told_by_each_dialect(dialect: Dialect, order: str) -> None:
    asked, served = ORDERS[order]
    server = OneAtATime(f"nobatch+{order}")
    try:
        assert server.serve(dialect, *asked) == served
    finally:
        server.go.set()
        server.manager.stop()
