"""The manager with a model that a test controls: order, answers, lifecycle and the original's names."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import batching
import policies
from batching import BatchingManager, Inference, InferenceError
from scheduling.iteration import Plan
from scheduling.scheduler import Output
from tests.support import SOON
from tests.support.fakes import FakeModel
from tests.support.serving import ALL, Serve, every_policy, expected, inference, is_answered, kind_of


@every_policy
def test_each_request_gets_its_own_tokens(serve: Serve, policy: str) -> None:
    served = serve(policy)
    lengths = {f"r{i}": 1 + i * 7 % 5 for i in range(30)}
    with ThreadPoolExecutor(30) as callers:
        answers = callers.map(lambda item: served.ask(*item).wait_for_completion(SOON), lengths.items())
        assert list(answers) == [expected(*item) for item in lengths.items()]
    assert served.is_empty()
    assert sorted(served.left) == sorted(lengths)


def test_a_batch_reaches_64_requests(serve: Serve) -> None:
    served = serve("dynamic", slots=64)
    served.hold()
    waiting = [served.ask(f"r{i}", 3) for i in range(64)]
    assert (served.manager.waiting, served.manager.running) == (64, 1)
    served.model.gate.set()
    for request in waiting:
        request.wait_for_completion(SOON)
    assert max(it.batch_size for it in served.iterations) == 64


@pytest.mark.parametrize(("policy", "first"), list(zip(ALL, ["long", "long", "short"])))
def test_a_short_request_that_arrives_late_overtakes_a_long_one_only_in_dynamic(
    serve: Serve, policy: str, first: str
) -> None:
    served = serve(policy)
    long = served.hold("long", 50)
    short = served.ask("short", 2)
    served.model.gate.set()
    assert all(map(is_answered, (short, long)))
    assert served.left[0] == first


@every_policy
def test_stop_ends_every_request(serve: Serve, policy: str) -> None:
    served = serve(policy, slots=2)
    everybody = [served.hold("running", 50)] + [served.ask(f"r{i}", 50) for i in range(5)]
    served.end()
    assert {kind_of(i) for i in everybody} == {"unavailable_error"}
    assert not served.manager.is_alive
    with pytest.raises(InferenceError, match="shutting down") as caught:
        served.ask("late", 1)
    assert caught.value.kind == "unavailable_error"


def test_requests_enqueued_before_the_loop_starts_are_served() -> None:
    manager = BatchingManager(FakeModel(range(99)), make_policy=policies.get_policy)
    request = manager.enqueue(inference("early", 2))
    assert (manager.is_alive, manager.waiting, manager.running) == (True, 1, 0)
    thread = manager.start(policies.get_policy("dynamic", max_batch_size=2))
    assert is_answered(request)
    manager.stop()
    thread.join(SOON)


def test_two_requests_of_the_same_id_get_their_own_answers(serve: Serve) -> None:
    served = serve()
    served.hold()
    short, long = served.ask("same", 2), served.ask("same", 9)
    answered_early = []

    def breaks(plan: Plan, outputs: list[Output]) -> list[Output]:
        answered_early.append(long.is_finished)
        return outputs

    served.model.breaks = breaks
    served.model.gate.set()
    assert all(map(is_answered, (short, long)))
    assert not any(answered_early)
    assert served.is_empty()


def test_an_inference_finishes_once_in_a_race() -> None:
    racing = inference("a", 1)
    barrier = threading.Barrier(8)

    def finish() -> bool:
        barrier.wait(SOON)
        return racing.finished()

    with ThreadPoolExecutor(8) as callers:
        outcomes = [f.result(SOON) for f in [callers.submit(finish) for _ in range(8)]]
    assert sorted(outcomes) == [False] * 7 + [True]
    racing.cancel()
    assert racing.error is None


@pytest.mark.parametrize(
    ("loop", "policy"), list(zip(["no_batching_loop", "static_batching_loop", "dynamic_batching_loop"], ALL))
)
def test_the_originals_loops_run_the_policy_of_their_name(loop: str, policy: str) -> None:
    manager = BatchingManager(
        FakeModel(range(99)),
        make_policy=policies.get_policy,
        make_inference=lambda prompt, n, **options: inference(prompt, n, **options),
    )
    thread = threading.Thread(target=getattr(manager, loop))
    thread.start()
    assert manager.enqueue("hello", 3).wait_for_completion(SOON) == expected("hello", 3)
    assert manager.scheduler is not None
    assert manager.scheduler.policy.name == policy
    manager.stop()
    thread.join(SOON)


def test_the_originals_names_exist() -> None:
    assert batching.MAX_BATCH_SIZE >= 8
    request = Inference("hello", 2, [5, 6, 7])
    assert (request.prompt, request.num_tokens, request.data) == ("hello", 2, [5, 6, 7])
    assert request.completion is None
    assert [request.add_token(8), request.add_token(9)] == [False, True]
    assert request.data == [5, 6, 7, 8, 9]
    assert request.finished()
    assert request.wait_for_completion() == request.completion == "hello"


def test_text_needs_make_inference_and_the_originals_loops_need_make_policy() -> None:
    manager = BatchingManager(FakeModel(range(99)))
    with pytest.raises(TypeError, match="make_inference"):
        manager.enqueue("text", 3)
    with pytest.raises(TypeError, match="make_policy"):
        manager.dynamic_batching_loop()
