"""The bounded queue: what it refuses, and how requests leave it before their last token."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import policies
from batching import Inference, InferenceError
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.scheduler import Output
from tests.support import SOON
from tests.support.serving import Serve, every_policy, expected, inference, is_answered, kind_of


def test_a_request_that_the_policy_refuses_ends_at_once(serve: Serve) -> None:
    served = serve(policies.get_policy("dynamic+rpm", max_batch_size=4, options={"limit": "2"}))
    served.hold()
    requests = [served.ask(f"r{i}", 1, client="greedy") for i in range(3)]
    served.model.gate.set()
    assert [requests[0].wait_for_completion(SOON), requests[1].wait_for_completion(SOON)]
    assert kind_of(requests[2]) == "overloaded"
    assert served.is_empty()


def test_a_full_queue_refuses_requests_until_there_is_room(serve: Serve) -> None:
    served = serve("nobatch", slots=1, max_queue=2)
    accepted = [served.hold(), served.ask("b", 1), served.ask("c", 1)]
    with pytest.raises(InferenceError, match=r"3 requests queued or running.*limit 3.*--max-queue") as full:
        served.ask("d", 1)
    assert full.value.kind == "overloaded"
    assert full.value.retry_after is not None
    assert full.value.retry_after >= 1
    served.model.gate.set()
    for request in accepted:
        request.wait_for_completion(SOON)
    assert is_answered(served.ask("d", 1))


@every_policy
def test_a_request_canceled_while_running_frees_its_slot(serve: Serve, policy: str) -> None:
    served = serve(policy, slots=1)
    running = served.hold("running", 100)
    waiting = served.ask("waiting", 2)
    running.cancel()
    assert kind_of(running) == "cancelled"  # at once: the model is still in its step
    served.model.gate.set()
    assert is_answered(waiting)
    assert len(running.sequence.output_ids) == 1
    assert served.is_empty()


@every_policy
def test_a_request_canceled_while_waiting_is_never_computed(serve: Serve, policy: str) -> None:
    served = serve(policy, slots=1)
    served.hold()
    gone, stays = served.ask("gone", 5), served.ask("stays", 2)
    gone.cancel()
    served.model.gate.set()
    assert is_answered(stays)
    assert kind_of(gone) == "cancelled"
    assert not any("gone" in plan for plan in served.model.computed)
    assert served.is_empty()


@every_policy
def test_requests_canceled_in_the_same_step_leave_in_one_pass(serve: Serve, policy: str) -> None:
    served = serve(policy, slots=2)
    passes: list[int] = []
    served.manager.observers.append(
        lambda iteration, left: passes.append(len(left)) if iteration is None and left else None
    )
    served.hold()
    gone = [served.ask(f"gone {i}", 5) for i in range(50)]
    for each in gone:
        each.cancel()
    served.model.gate.set()
    assert is_answered(served.ask("next", 2))
    assert passes == [50]
    assert served.is_empty()


def test_a_request_canceled_before_it_is_enqueued_is_never_computed(serve: Serve) -> None:
    served = serve()
    gone = inference("gone", 5)
    gone.cancel()
    served.manager.enqueue(gone)
    served.ask("next", 1).wait_for_completion(SOON)
    assert served.model.computed == [["next"]]
    assert gone.sequence.finished_at is not None
    assert gone.sequence.finished_at >= gone.sequence.arrived_at
    assert served.is_empty()


def test_a_static_batch_ends_when_its_longest_member_is_canceled(serve: Serve) -> None:
    served = serve("static", slots=2)
    served.hold()
    short, long = served.ask("short", 1), served.ask("long", 100)

    def breaks(plan: Plan, outputs: list[Output]) -> list[Output]:
        if plan.number == 4:
            long.cancel()
        return outputs

    served.model.breaks = breaks
    served.model.gate.set()
    assert is_answered(short)
    assert len(served.iterations) == 4


def test_a_caller_that_waits_too_long_gets_a_timeout_and_its_request_ends(serve: Serve) -> None:
    served = serve("nobatch")
    running = served.hold("running", 9)
    waiting = served.ask("waiting", 9)
    for late in (running, waiting):
        with pytest.raises(InferenceError, match=r"within 0 s.*--request-timeout") as caught:
            late.wait_for_completion(0)
        assert caught.value.kind == "timeout_error"
        assert late.completion is None
    served.model.gate.set()
    assert is_answered(served.ask("next", 1))
    assert served.model.computed == [["running"], ["next"]]
    assert served.is_empty()


def test_a_request_that_can_never_fit_is_refused_with_numbers(serve: Serve) -> None:
    served = serve(pages=PagePool(5, 4))
    with pytest.raises(InferenceError, match=r"17 tokens.* 5 KV pages of 4 .*are 4\..*--kv-memory") as e:
        served.ask("big", 14)
    assert e.value.kind == "invalid_request_error"
    assert is_answered(served.ask("fits", 13))


@pytest.mark.parametrize(("prompt", "num_tokens"), [(0, 3), (3, 0), (3, -1)])
def test_a_request_with_nothing_to_compute_is_refused(serve: Serve, prompt: int, num_tokens: int) -> None:
    with pytest.raises(InferenceError, match=r"prompt has . tokens and num_tokens is") as caught:
        serve().ask("empty", num_tokens, prompt=prompt)
    assert caught.value.kind == "invalid_request_error"


def test_cancelling_after_the_answer_changes_nothing(serve: Serve) -> None:
    served = serve()
    done = served.ask("a", 2)
    done.wait_for_completion(SOON)
    done.cancel()
    assert done.wait_for_completion(0) == expected("a", 2)


def test_requests_that_come_and_go_at_random_moments_all_end(serve: Serve) -> None:
    served = serve("dynamic", slots=4, max_queue=1000)

    def call(i: int) -> str:
        request = served.ask(f"r{i}", 1 + i % 7)
        if i % 3 == 0:
            request.cancel()
        try:
            return request.wait_for_completion(0 if i % 5 == 0 else SOON)
        except InferenceError as error:
            return error.kind

    with ThreadPoolExecutor(16) as callers:
        outcomes = list(callers.map(call, range(400)))
    allowed = [{expected(f"r{i}", 1 + i % 7), "cancelled", "timeout_error"} for i in range(400)]
    assert all(outcome in fine for outcome, fine in zip(outcomes, allowed))
    served.ask("last", 1).wait_for_completion(SOON)
    assert sorted(served.left) == sorted([*(f"r{i}" for i in range(400)), "last"])
    assert served.is_empty()


def test_queued_tokens_are_limited_but_one_request_always_fits(serve: Serve) -> None:
    served = serve("nobatch", slots=1, max_queue_tokens=20)
    running = served.hold()
    first = served.ask("long", 100)
    with pytest.raises(InferenceError, match="--max-queue-tokens") as full:
        served.ask("short", 1)
    assert full.value.kind == "overloaded"
    served.model.gate.set()
    for request in (running, first):
        request.wait_for_completion(SOON)
    assert is_answered(served.ask("short", 1))


def test_a_listener_that_blocks_delays_neither_the_loop_nor_other_requests(serve: Serve) -> None:
    served = serve()
    entered, released = threading.Event(), threading.Event()

    def listen(inference: Inference) -> None:
        if inference.id == "slow":
            entered.set()
            assert released.wait(SOON)

    served.manager.listeners.append(listen)
    with ThreadPoolExecutor(1) as callers:
        slow = callers.submit(served.ask, "slow", 1)
        assert entered.wait(SOON)
        assert is_answered(served.ask("other", 2))
        released.set()
        assert slow.result(SOON).wait_for_completion(SOON) == expected("slow", 1)


@pytest.mark.parametrize("limit", ["queue_timeout", "request_timeout"])
def test_the_time_limit_of_a_request_applies_if_it_is_shorter_than_the_servers(serve: Serve, limit: str) -> None:
    served = serve("nobatch", **{limit: 600.0})
    served.hold()
    patient, impatient = served.ask("patient", 1), served.ask("impatient", 1, **{limit: 1e-9})
    served.model.gate.set()
    assert kind_of(impatient) == "timeout_error"
    assert is_answered(patient)
    assert served.is_empty()
