"""A policy that was switched to and raises an error: the one before it goes on, and no client notices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from calls import connected
from flask import Flask

import policies
from api.service import LoadedEngine, Service
from app import create_app
from batching import Inference
from config import Config
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.sequence import Sequence
from tests.support import wait_until
from tests.support.fakes import FakeModel, fake_engine

DECIDING = [
    "refuse", "expires_at", "order", "admit", "blocked_by", "reserve_tokens", "victim", "preempt", "allocate_tokens",
    "release", "deadline",
]  # fmt: skip
NOTING = ["on_arrival", "on_admit", "on_preempt", "on_token", "on_step", "on_finish", "on_cancel"]


ERROR = KeyError("deliberately")


class Waiting(Policy):
    """Lets no request join, so that it is asked how long."""

    def admit(self, *args: Any) -> int:
        return 0


def failing(hook: str, first: int, base: type[Policy] = Policy, result: Any = ERROR) -> type[Policy]:
    """Return a policy whose hook raises, or returns, `result` from its call number `first` on."""

    def call(self: Any, *args: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls < first:
            return getattr(super(cls, self), hook)(*args)
        if isinstance(result, BaseException):
            raise result
        return result(*args) if callable(result) else result

    cls = type("Failing", (base,), {hook: call, "margin": 0})  # so that requests soon need more pages
    return cls


class Machine:
    """An app and its engine on few pages, whose model answers each prompt by its own letters."""

    def __init__(self, app: Flask, model: FakeModel, engine: LoadedEngine) -> None:
        self.service: Service = app.extensions["service"]
        self.client = app.test_client()
        self.model, self.manager = model, engine.manager
        self.go, self.entered = threading.Event(), threading.Event()
        self.go.set()
        model.before = self._before
        model.output = lambda seq, count: self.token(seq.prompt_ids, len(seq.output_ids))  # type: ignore[method-assign]

    def _before(self, plan: Any) -> None:
        self.entered.set()
        assert self.go.wait(60)

    @staticmethod
    def token(prompt: list[int], place: int) -> int:
        return 97 + (sum(prompt) + place) % 26

    def put(self, policy: type[Policy], name: str = "dynamic") -> Any:
        """Switch to a policy by the API, under the name of another one."""
        chosen = SimpleNamespace(**{**vars(policies), "get_policy": lambda name, slots, options, own: policy(slots)})
        self.service.policies = chosen
        try:
            return self.client.put("/policy", json={"policy": name})
        finally:
            self.service.policies = policies

    def ask(self, number: int, tokens: int) -> Inference:
        return self.manager.enqueue(Inference("", tokens, [number] * 5, open_ended=True))

    def hold(self) -> list[Inference]:
        """Return requests of which the first ones are in a step that does not end before `go`."""
        self.go.clear()
        self.entered.clear()
        first = [self.ask(1, 12)]
        assert self.entered.wait(60)
        return first + [self.ask(number, 4 + 3 * (number % 5)) for number in range(2, 9)]

    def serve(self) -> None:
        """Send requests that need each other's pages, of which one is cancelled, and expect whole answers."""
        asked = self.hold()
        asked.pop().cancel()
        self.go.set()
        self.expect(asked)

    def expect(self, asked: list[Inference]) -> None:
        """Expect whole answers, and that nothing is left behind."""
        for one in asked:
            one.wait_for_completion(60)
            prompt = one.sequence.prompt_ids
            assert one.output_ids == [self.token(prompt, place) for place in range(one.num_tokens)]
        inbox, pages = self.manager.inbox, self.manager.pages
        assert pages is not None
        wait_until(
            lambda: (
                (inbox.places.taken, inbox.queued_tokens, inbox.open, pages.used, self.manager.running)
                == (0, 0, {}, 0, 0)
            )
        )
        assert self.manager.scheduler is not None
        assert self.manager.scheduler.batch.free_slots == self.manager.max_batch_size

    @property
    def known(self) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get("/policy").get_json()
        return found


@pytest.fixture(scope="module")
def app() -> Flask:
    return create_app(Config(policy="dynamic", max_batch_size=4, access_log=False))


@pytest.fixture
def machine(app: Flask, model: FakeModel) -> Iterator[Machine]:
    engine = fake_engine(model, max_batch_size=4, max_queue=100, pages=PagePool(9, 4, salt="test"))
    for _ in connected(app, engine):
        yield Machine(app, model, engine)


@pytest.mark.parametrize(("first", "error"), [(1, ERROR), (3, SystemExit("deliberately"))])
@pytest.mark.parametrize("hook", DECIDING + NOTING)
def test_an_error_of_any_hook_costs_no_request_a_token(
    machine: Machine, hook: str, first: int, error: BaseException
) -> None:
    first = {"release": 2 * first, "on_cancel": 1, "deadline": 1}.get(hook, first)  # the switch calls `release` once
    policy = failing(hook, first, Waiting if hook == "deadline" else Policy, error)
    assert machine.put(policy).status_code == 200
    machine.serve()
    known = machine.known
    failure = known["last_failure"]
    assert (known["policy"], failure["policy"], failure["now"]) == ("dynamic", "test-policy-failures", "dynamic")
    assert failure["hook"] == hook or (hook, failure["hook"]) == ("on_finish", "on_cancel")  # which calls it
    assert failure["file"] == "test_policy_failures.py"
    assert failure["error"].startswith(type(error).__name__)
    assert machine.manager.fallback.failures == 1


UNKNOWN = Sequence([1], 1, id="unknown")
RULES: dict[str, tuple[str, Any]] = {
    "order yields a request that is not in the queue": ("order", [UNKNOWN]),
    "order yields a request twice": ("order", lambda waiting, now: [next(iter(waiting))] * 2),
    "order yields no request": ("order", [None]),
    "admit returns nothing": ("admit", None),
    "admit takes other arguments": ("admit", lambda: 1),
    "allocate_tokens returns too few": ("allocate_tokens", []),
    "allocate_tokens gives none": ("allocate_tokens", lambda running, budget: [0] * len(running)),
    "allocate_tokens gives too many": ("allocate_tokens", lambda running, budget: [99] * len(running)),
    "release lets unfinished ones go": ("release", list),
    "release lets a request go twice": ("release", lambda running: [s for s in running if s.is_finished] * 2),
    "victim is not running": ("victim", UNKNOWN),
    "preempt takes one that does not run": ("preempt", [UNKNOWN]),
    "preempt takes one twice": ("preempt", lambda waiting, running, *more: [*running, *running]),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_of_scheduling_costs_no_request_a_token(machine: Machine, rule: str) -> None:
    hook, result = RULES[rule]
    machine.put(failing(hook, 2, result=result))
    machine.serve()
    known = machine.known
    assert (known["policy"], known["last_failure"]["hook"]) == ("dynamic", hook)
    assert known["last_failure"]["line"] > 0


@pytest.mark.parametrize("error", [ERROR, SystemExit()])
@pytest.mark.parametrize("hook", ["on_admit", "on_arrival", "expires_at", "release"])
def test_a_policy_that_fails_in_the_switch_changes_nothing(machine: Machine, hook: str, error: BaseException) -> None:
    asked = machine.hold()
    answers: list[Any] = []
    switch = threading.Thread(target=lambda: answers.append(machine.put(failing(hook, 1, result=error))))
    switch.start()
    wait_until(lambda: machine.manager.inbox._switches)
    machine.go.set()
    switch.join(60)
    machine.expect(asked)
    assert answers[0].status_code == 400
    assert f"{hook}()" in answers[0].get_json()["error"]["message"]
    assert (machine.known["policy"], machine.known["last_failure"]) == ("dynamic", None)


def test_policies_that_fail_one_after_the_other_lead_back_to_that_of_the_start(machine: Machine) -> None:
    first = type(machine.manager.policy)
    for hook in ("order", "on_admit", "on_step"):
        assert machine.put(failing(hook, 1)).status_code == 200
    machine.serve()
    assert machine.manager.fallback.failures == 3
    assert type(machine.manager.policy) is first


def test_the_policy_of_the_start_still_ends_the_loop_when_it_is_back(machine: Machine) -> None:
    manager = machine.manager
    first = type(manager.policy)
    machine.put(failing("order", 1))
    machine.serve()
    broken: Callable[..., Any] = failing("order", 1).order
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first, "order", broken)
        manager.enqueue(Inference("", 3, [1]))
        wait_until(lambda: not manager.is_alive)


def test_everything_that_looks_in_reports_the_failure(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.put(failing("on_step", 2))
    machine.serve()
    assert "eb_policy_failures_total 1.0" in machine.client.get("/metrics").text
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert all(word in errors[0].getMessage() for word in ("on_step()", __file__, "KeyError", "dynamic"))
    events = [e.frame for e in machine.service.feed.entries() if e.kind == "policy"]
    assert b'"hook":"on_step"' in events[-1]
    assert b'"last_failure":null' in events[-2]
