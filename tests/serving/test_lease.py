"""A policy for a while: the one before comes back, the object itself, however the lease ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient

import policies
from app import create_app
from batching import BatchingManager, Inference, InferenceError
from config import Config
from costs.mock import MockModel
from costs.published import Constant
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.sequence import Sequence
from serving.fallback import Lease
from tests.support import wait_until
from tests.support.fakes import fake_engine

ALL = [*policies.names(), *(f"dynamic+{order}" for order in policies.order_names() if order != "rpm")]
QUICK: dict[str, dict[str, object]] = {name: {"flush": 0.01} for name in ("fixed", "multibin", "static-global")}
LONG, SHORT = 600.0, 0.01


class Clock:
    """Seconds that pass when they are told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Learning(Policy):
    """Counts what ended, and who is here; `slots` are its own."""

    def __init__(self) -> None:
        self.finished, self.here = 0, set[Sequence]()

    def on_arrival(self, seq: Sequence, now: float) -> None:
        assert seq not in self.here
        self.here.add(seq)

    def on_finish(self, seq: Sequence, now: float) -> None:
        self.finished += 1
        self.here.discard(seq)

    def on_cancel(self, seq: Sequence, now: float) -> None:
        self.here.discard(seq)


class Machine:
    """A loop on a clock of its own, which serves with a policy that learns."""

    def __init__(self) -> None:
        self.clock, self.own = Clock(), Learning(2)
        self.manager = BatchingManager(MockModel(Constant(0.0, 0.0)), max_batch_size=2, clock=self.clock)
        self.manager.start(self.own)

    def lend(
        self, holder: str = "a", seconds: float = 20.0, policy: Policy | None = None, renews: bool = False
    ) -> None:
        lent = policy or policies.get_policy("dynamic", 2)
        self.manager.inbox.switch(lent, 60, Lease(holder, seconds, renews))

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        with self.manager.inbox.changed:
            self.manager.inbox.changed.notify()

    def serve(self, count: int = 3) -> None:
        for one in [self.manager.enqueue(Inference("", 3, [1, 2])) for _ in range(count)]:
            one.wait_for_completion(60)


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    machine.manager.stop()


def test_the_object_comes_back_with_what_it_has_learned(machine: Machine) -> None:
    machine.serve()
    machine.lend()
    assert machine.manager.policy_name == "dynamic"
    machine.serve()
    machine.pass_time(19)
    machine.serve()
    assert machine.manager.policy is not machine.own
    machine.pass_time(1)
    wait_until(lambda: machine.manager.policy is machine.own)
    assert machine.own.finished == 3
    machine.serve()
    assert machine.own.finished == 6
    wait_until(lambda: not machine.own.here)


def test_who_holds_it_renews_it_with_another_policy_and_nobody_else_switches(machine: Machine) -> None:
    machine.lend("a")
    machine.pass_time(15)
    machine.lend("a", policy=policies.get_policy("nobatch", 2), renews=True)
    machine.pass_time(15)
    machine.serve()
    assert machine.manager.policy_name == "nobatch"
    for lease in (None, Lease("b", 20), Lease("b", 20, renews=True)):
        with pytest.raises(InferenceError, match="5 s more") as error:
            machine.manager.inbox.switch(policies.get_policy("static", 2), 60, lease)
        assert error.value.kind == "conflict_error"
    machine.pass_time(5)
    wait_until(lambda: machine.manager.policy is machine.own)
    with pytest.raises(InferenceError, match="has ended"):
        machine.lend("a", renews=True)
    machine.manager.inbox.switch(policies.get_policy("static", 2), 60)
    assert machine.manager.policy_name == "static"


def test_a_lease_ends_at_once_and_without_one_nothing_changes(machine: Machine) -> None:
    machine.lend()
    for _ in range(2):
        machine.manager.inbox.switch(None, 60)
        assert machine.manager.policy is machine.own


def test_a_leased_policy_that_fails_ends_the_lease(machine: Machine) -> None:
    class Failing(Policy):
        def on_finish(self, seq: Sequence, now: float) -> None:
            raise KeyError("deliberately")

    machine.lend("a", policy=policies.get_policy("nobatch", 2))
    machine.lend("a", policy=Failing(2), renews=True)
    machine.serve()
    wait_until(lambda: machine.manager.policy is machine.own)
    assert machine.manager.fallback.failures == 1
    with pytest.raises(InferenceError, match="has ended"):
        machine.lend("a", renews=True)


def test_a_policy_that_cannot_be_kept_is_followed_by_one_like_it() -> None:
    class Stubborn(Learning):
        def on_cancel(self, seq: Sequence, now: float) -> None:
            raise KeyError("deliberately")

    model = MockModel(Constant(0.002, 0.0))
    manager = BatchingManager(model, max_batch_size=2)
    first = Stubborn(2)
    manager.start(first)
    one = manager.enqueue(Inference("", 100_000, [1, 2]))  # it is still there in the end
    wait_until(lambda: one.output_ids)
    manager.inbox.switch(policies.get_policy("nobatch", 2), 60, Lease("a", LONG))
    manager.inbox.switch(None, 60)
    assert type(manager.policy) is Stubborn
    assert manager.policy is not first
    one.cancel()
    manager.stop()


@pytest.mark.parametrize("name", ALL)
def test_every_policy_can_be_kept_while_requests_come_and_go(name: str) -> None:
    manager = BatchingManager(MockModel(Constant(0.0002, 0.0)), pages=PagePool(40, 4, salt="t"), max_batch_size=3)
    own = policies.get_policy(name, 3, QUICK.get(name, {}))
    manager.start(own)
    asked = []
    for _ in range(6):
        asked += [manager.enqueue(Inference("", 1 + i, [i % 3, *range(i)], client="ab"[i % 2])) for i in range(9)]
        manager.inbox.switch(policies.get_policy("dynamic", 3), 60, Lease("a", LONG))
        asked += [manager.enqueue(Inference("", 3, [i])) for i in range(4)]
        manager.inbox.switch(None, 60)
        assert manager.policy is own
    manager.inbox.switch(policies.get_policy("dynamic", 3), 60)  # which waits for nobody
    for one in asked:
        one.wait_for_completion(60)
    assert manager.fallback.failures == 0
    assert manager.pages is not None
    wait_until(lambda: manager.pages.used == 0 and not manager.running)
    manager.stop()


@pytest.fixture
def client() -> FlaskClient:
    return create_app(Config(max_batch_size=8), fake_engine()).test_client()


def test_a_lease_by_the_api(client: FlaskClient) -> None:
    before = client.get("/policy").get_json()["policy"]

    def put(policy: str, **fields: Any) -> Any:
        return client.put("/policy", json={"policy": policy, **fields})

    reply = put("nobatch", for_s=LONG)
    assert reply.status_code == 200, reply.text
    lease, now = reply.get_json()["lease"], reply.get_json()["now"]
    assert put("static", for_s=LONG, lease=lease).get_json()["now"] > now
    refused = [put("dynamic"), put("dynamic", for_s=LONG), put("dynamic", for_s=LONG, lease="another")]
    assert [one.status_code for one in refused] == [409] * 3
    assert refused[0].get_json()["error"]["type"] == "conflict_error"
    assert client.get("/policy").get_json()["policy"] == "static"
    assert client.get("/served").get_json()["leased"]
    for wrong in ("", "another"):  # of a shell variable that is not set
        assert client.delete(f"/policy/lease?lease={wrong}").get_json()["policy"] == "static"
    assert client.delete("/policy/lease").get_json()["policy"] == before
    assert put("static", for_s=LONG, lease=lease).status_code == 409
    assert put("nobatch", for_s=SHORT).get_json()["policy"] in ("nobatch", before)  # it may have ended already
    wait_until(lambda: client.get("/policy").get_json()["policy"] == before)
    assert put("static", lease=lease).status_code == 400
    for seconds in (0, -1, 601, "20", True):
        assert put("static", for_s=seconds).status_code == 400
    assert put("dynamic").status_code == 200


def test_a_leased_policy_of_the_name_that_serves_is_like_it(client: FlaskClient, machine: Machine) -> None:
    """It has the same options, and can be a user's own, while it serves and while another is leased in its place."""

    def put(policy: str, **fields: Any) -> Any:
        return client.put("/policy", json={"policy": policy, **fields}).get_json()

    before = put("dynamic+sjf", options={"predictor": "mean"})["options"]
    lease = put("dynamic+sjf", for_s=LONG)
    assert lease["options"] == before
    assert put("nobatch", for_s=LONG, lease=lease["lease"])["policy"] == "nobatch"
    assert put("dynamic+sjf", for_s=LONG, lease=lease["lease"])["options"] == before
    other = put("dynamic+sjf", for_s=LONG, lease=lease["lease"], options={"predictor": "noisy"})["options"]
    assert other["predictor"] == "noisy"
    client.delete("/policy/lease")
    assert put("dynamic+sjf")["options"]["predictor"] != "mean"  # for good, it is as it is named

    fallback = machine.manager.fallback
    for name, known in ((machine.own.name, True), ("static", False)):
        assert isinstance(fallback.like(name, machine.manager.policy), Learning) == known
    machine.lend()
    assert isinstance(fallback.like(machine.own.name, machine.manager.policy), Learning)


def test_only_the_holder_of_a_lease_shows_what_it_found(client: FlaskClient) -> None:
    def receipt(lease: str, lines: Any) -> int:
        return client.post("/policy/receipt", json={"lease": lease, "lines": lines}).status_code

    assert receipt("x", [["take B"]]) == 409
    lease = client.put("/policy", json={"policy": "nobatch", "for_s": LONG}).get_json()["lease"]
    assert receipt("x", [["take B"]]) == 409
    assert receipt(lease, [["what", "A"], ["E2E mean", "1"], ["take B"]]) == 200
    for wrong in ([["x"] * 9], [["x"]] * 33, [["x" * 1001]], [[1]], "text"):
        assert receipt(lease, wrong) == 400
    client.delete("/policy/lease")
    assert receipt(lease, [["take B"]]) == 409


def test_what_was_served_by_which_policy(client: FlaskClient) -> None:
    def ask(user: str) -> None:
        assert client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2, "user": user}).status_code == 200

    ask("ann")
    wait_until(lambda: client.get("/served").get_json()["next"] == 1)
    client.put("/policy", json={"policy": "nobatch"})
    ask("ann")
    ask("ben")
    wait_until(lambda: client.get("/served").get_json()["next"] == 3)
    told = client.get("/served").get_json()
    assert (told["open"], told["lost"]) == ([], 0)
    rows = told["ended"]
    assert [one["policy"] for one in rows] == ["dynamic", "nobatch", "nobatch"]
    assert all(one["at"] <= one["first"] <= one["end"] <= told["now"] and one["tokens"] == 2 for one in rows)
    assert [one["failed"] for one in rows] == [False] * 3
    first, second, third = (one["client"] for one in rows)
    assert first == second != third
    assert "ann" not in first
    assert client.get("/served?since=2").get_json()["ended"] == rows[2:]
    assert client.get("/served?since=3").get_json()["ended"] == []
    for wrong in ("-1", "abc", "1.5", "NaN", ""):
        assert client.get(f"/served?since={wrong}").status_code == 400
