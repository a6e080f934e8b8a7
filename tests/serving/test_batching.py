"""The manager with models that do what a test tells them: every request is answered, whatever breaks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from served import ALL, SOON, FakeModel, Serve, Words, every_policy, expected, inference, kind_of

import batching
import policies
from batching import BatchingManager, Inference, InferenceError
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Output


@every_policy
def test_everybody_is_answered_with_their_own_tokens(serve: Serve, policy: str) -> None:
    served = serve(policy)
    lengths = {f"r{i}": 1 + i * 7 % 5 for i in range(30)}
    with ThreadPoolExecutor(30) as callers:
        answers = callers.map(lambda item: served.ask(*item).wait_for_completion(SOON), lengths.items())
        assert list(answers) == [expected(*item) for item in lengths.items()]
    assert served.is_empty()
    assert sorted(served.left) == sorted(lengths)


def test_a_batch_of_64_really_reaches_64(serve: Serve) -> None:
    served = serve("dynamic", slots=64)
    served.hold()
    waiting = [served.ask(f"r{i}", 3) for i in range(64)]
    assert (served.manager.waiting, served.manager.running) == (64, 1)
    served.model.gate.set()
    for asked in waiting:
        asked.wait_for_completion(SOON)
    assert max(it.batch_size for it in served.iterations) == 64


@pytest.mark.parametrize(("policy", "first"), list(zip(ALL, ["long", "long", "short"])))
def test_a_short_request_that_arrives_late_overtakes_a_long_one_only_in_dynamic(
    serve: Serve, policy: str, first: str
) -> None:
    served = serve(policy)
    long = served.hold("long", 50)
    short = served.ask("short", 2)
    served.model.gate.set()
    assert short.wait_for_completion(SOON) == expected("short", 2)
    assert long.wait_for_completion(SOON) == expected("long", 50)
    assert served.left[0] == first


@every_policy
def test_a_step_that_raises_is_answered_and_the_loop_goes_on(serve: Serve, policy: str) -> None:
    served = serve(policy)

    def breaks(plan: Plan, outputs: list[Output]) -> list[Output]:
        if any(seq.id == "bad" for seq in plan.sequences):
            raise RuntimeError("poisoned")
        return outputs

    served.model.breaks = breaks
    bad = served.hold("bad", 5)
    later = served.ask("later", 5)
    served.model.gate.set()
    assert kind_of(bad) == "server_error"
    assert later.wait_for_completion(SOON) == expected("later", 5)
    assert served.manager.recovery.steps_failed == 1
    assert served.manager.is_alive
    assert served.is_empty()


def test_all_of_a_failed_step_are_answered_and_nobody_else(serve: Serve) -> None:
    served = serve("dynamic", slots=3)

    def breaks(plan: Plan, outputs: list[Output]) -> list[Output]:
        if plan.number == 2:
            raise RuntimeError("once")
        return outputs

    served.model.breaks = breaks
    first = served.hold("first", 9)
    asked = [served.ask(f"r{i}", 9) for i in range(4)]
    served.model.gate.set()
    assert [kind_of(i) for i in [first, *asked[:2]]] == ["server_error"] * 3
    assert [i.wait_for_completion(SOON) for i in asked[2:]] == [expected(f"r{i}", 9) for i in (2, 3)]


def test_a_model_that_always_fails_leaves_no_finished_member_of_a_batch_behind(serve: Serve) -> None:
    served = serve("static", slots=2)

    def breaks(plan: Plan, outputs: list[Output]) -> list[Output]:
        if plan.number > 2:
            raise RuntimeError("for ever")
        return outputs

    served.model.breaks = breaks
    served.hold()
    short, long = served.ask("short", 1), served.ask("long", 5)
    served.model.gate.set()
    assert short.wait_for_completion(SOON) == expected("short", 1)
    assert kind_of(long) == "server_error"
    assert kind_of(served.ask("next", 1)) == "server_error"
    assert served.is_empty()


@pytest.mark.parametrize("short", [[], [None]])
def test_a_model_that_gives_too_little_fails_and_does_not_hang(serve: Serve, short: list[Output]) -> None:
    served = serve()
    served.model.breaks = lambda plan, outputs: short if plan.number else outputs
    assert kind_of(served.ask("a", 3)) == "server_error"
    served.model.breaks = lambda plan, outputs: outputs
    assert served.ask("b", 3).wait_for_completion(SOON) == expected("b", 3)


def test_one_that_breaks_a_batch_of_8_is_found_and_its_neighbours_get_their_tokens(serve: Serve) -> None:
    served = serve("dynamic", slots=8)
    tried: list[int] = []

    def breaks(plan: Plan, outputs: list[Output]) -> list[Output]:
        tried.append(len(plan.sequences))
        if any(seq.id == "r5" for seq in plan.sequences):
            raise RuntimeError("poisoned")
        return outputs

    served.hold()
    waiting = {f"r{i}": served.ask(f"r{i}", 6) for i in range(8)}
    served.model.breaks = breaks
    served.model.gate.set()
    assert kind_of(waiting.pop("r5")) == "server_error"
    for id, asked in waiting.items():
        assert asked.wait_for_completion(SOON) == expected(id, 6)
    assert served.manager.recovery.steps_failed == 1
    assert tried[1 : 2 + served.manager.recovery.steps_retried] == [8, 8, 4, 4, 2, 1, 1, 1, 2]
    assert served.is_empty()


def test_a_step_that_fails_once_harms_nobody(serve: Serve) -> None:
    served = serve("dynamic", slots=4)
    faults = iter([True])

    def breaks(plan: Plan, outputs: list[Output]) -> list[Output]:
        if next(faults, False):
            raise RuntimeError("once")
        return outputs

    served.hold()
    waiting = [served.ask(f"r{i}", 3) for i in range(4)]
    served.model.breaks = breaks
    served.model.gate.set()
    for i, asked in enumerate(waiting):
        assert asked.wait_for_completion(SOON) == expected(f"r{i}", 3)
    assert (served.manager.recovery.steps_failed, served.manager.recovery.steps_retried) == (1, 1)


def test_whom_a_policy_refuses_is_told_at_once(serve: Serve) -> None:
    served = serve(policies.get_policy("dynamic+rpm", max_batch_size=4, options={"limit": "2"}))
    served.hold()
    asked = [served.ask(f"r{i}", 1, client="greedy") for i in range(3)]
    served.model.gate.set()
    assert [asked[0].wait_for_completion(SOON), asked[1].wait_for_completion(SOON)]
    assert kind_of(asked[2]) == "overloaded"
    assert served.is_empty()


def test_a_row_that_fails_fails_alone(serve: Serve) -> None:
    served = serve()

    def breaks(plan: Plan, outputs: list[Output]) -> list[Output]:
        rows = zip(plan.sequences, outputs)
        return [ValueError("nan") if seq.id == "bad" else token for seq, token in rows]

    served.model.breaks = breaks
    served.hold()
    bad, good = served.ask("bad", 4), served.ask("good", 4)
    served.model.gate.set()
    assert kind_of(bad) == "server_error"
    assert good.wait_for_completion(SOON) == expected("good", 4)
    assert served.manager.recovery.steps_failed == 0


def test_a_stop_callback_that_raises_fails_its_own_request_alone(serve: Serve) -> None:
    served = serve()
    served.hold()
    bad = served.ask("bad", 4, text=Words(lambda token: {}[token]))
    stopped = served.ask("stopped", 4, text=Words(lambda token: "stop" if token == 1 else None))
    good = served.ask("good", 4)
    served.model.gate.set()
    assert kind_of(bad) == "server_error"
    assert stopped.wait_for_completion(SOON) == expected("stopped", 2)
    assert good.wait_for_completion(SOON) == expected("good", 4)


def test_a_full_queue_refuses_and_takes_again_when_there_is_room(serve: Serve) -> None:
    served = serve("nobatch", slots=1, max_queue=2)
    accepted = [served.hold(), served.ask("b", 1), served.ask("c", 1)]
    with pytest.raises(InferenceError, match=r"3 requests queued or running.*limit 3.*--max-queue") as full:
        served.ask("d", 1)
    assert full.value.kind == "overloaded"
    assert full.value.retry_after is not None
    assert full.value.retry_after >= 1
    served.model.gate.set()
    for asked in accepted:
        asked.wait_for_completion(SOON)
    assert served.ask("d", 1).wait_for_completion(SOON) == expected("d", 1)


@every_policy
def test_who_cancels_while_running_frees_the_slot(serve: Serve, policy: str) -> None:
    served = serve(policy, slots=1)
    running = served.hold("running", 100)
    waiting = served.ask("waiting", 2)
    running.cancel()
    assert kind_of(running) == "cancelled"  # at once: the model is still in its step
    served.model.gate.set()
    assert waiting.wait_for_completion(SOON) == expected("waiting", 2)
    assert len(running.sequence.output_ids) == 1
    assert served.is_empty()


@every_policy
def test_who_cancels_while_waiting_is_never_computed(serve: Serve, policy: str) -> None:
    served = serve(policy, slots=1)
    served.hold()
    gone, stays = served.ask("gone", 5), served.ask("stays", 2)
    gone.cancel()
    served.model.gate.set()
    assert stays.wait_for_completion(SOON) == expected("stays", 2)
    assert kind_of(gone) == "cancelled"
    assert not any("gone" in plan for plan in served.model.plans)
    assert served.is_empty()


@every_policy
def test_those_who_cancel_in_the_same_step_leave_in_one_pass(serve: Serve, policy: str) -> None:
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
    assert served.ask("next", 2).wait_for_completion(SOON) == expected("next", 2)
    assert passes == [50]
    assert served.is_empty()


def test_who_cancels_before_it_is_enqueued_is_never_computed(serve: Serve) -> None:
    served = serve()
    gone = inference("gone", 5)
    gone.cancel()
    served.manager.enqueue(gone)
    served.ask("next", 1).wait_for_completion(SOON)
    assert served.model.plans == [["next"]]
    assert gone.sequence.finished_at is not None
    assert gone.sequence.finished_at >= gone.sequence.arrived_at
    assert served.is_empty()


def test_the_rest_of_a_static_batch_is_answered_when_its_longest_member_goes(serve: Serve) -> None:
    served = serve("static", slots=2)
    served.hold()
    short, long = served.ask("short", 1), served.ask("long", 100)

    def breaks(plan: Plan, outputs: list[Output]) -> list[Output]:
        if plan.number == 4:
            long.cancel()
        return outputs

    served.model.breaks = breaks
    served.model.gate.set()
    assert short.wait_for_completion(SOON) == expected("short", 1)
    assert len(served.iterations) == 4


def test_who_waits_too_long_gets_a_timeout_and_is_out(serve: Serve) -> None:
    served = serve("nobatch")
    running = served.hold("running", 9)
    waiting = served.ask("waiting", 9)
    for late in (running, waiting):
        with pytest.raises(InferenceError, match=r"within 0 s.*--request-timeout") as caught:
            late.wait_for_completion(0)
        assert caught.value.kind == "timeout_error"
        assert late.completion is None
    served.model.gate.set()
    assert served.ask("next", 1).wait_for_completion(SOON) == expected("next", 1)
    assert served.model.plans == [["running"], ["next"]]
    assert served.is_empty()


@every_policy
def test_stop_answers_everybody(serve: Serve, policy: str) -> None:
    served = serve(policy, slots=2)
    everybody = [served.hold("running", 50)] + [served.ask(f"r{i}", 50) for i in range(5)]
    served.end()
    assert {kind_of(i) for i in everybody} == {"unavailable_error"}
    assert not served.manager.is_alive
    with pytest.raises(InferenceError, match="shutting down") as caught:
        served.ask("late", 1)
    assert caught.value.kind == "unavailable_error"


def test_a_policy_that_raises_ends_the_loop_and_everybody_is_answered(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Policy):
        def on_token(self, *args: Any) -> None:
            raise ZeroDivisionError

    served = serve(Broken(max_batch_size=1))
    late: list[Inference] = []

    def breaks(plan: Plan, outputs: list[Output]) -> list[Output]:
        late.append(served.ask("late", 1))
        return outputs

    served.model.breaks = breaks
    everybody = [served.hold(), served.ask("waiting", 1)]
    served.model.gate.set()
    assert [kind_of(i) for i in everybody] == ["unavailable_error"] * 2
    served.thread.join(SOON)
    assert [kind_of(i) for i in late] == ["unavailable_error"]
    assert not served.manager.is_alive
    assert "ZeroDivisionError" in caplog.text


def test_a_loop_that_has_not_begun_is_alive_and_answers_when_it_does() -> None:
    manager = BatchingManager(FakeModel(), make_policy=policies.get_policy)
    asked = manager.enqueue(inference("early", 2))
    assert (manager.is_alive, manager.waiting, manager.running) == (True, 1, 0)
    thread = manager.start(policies.get_policy("dynamic", max_batch_size=2))
    assert asked.wait_for_completion(SOON) == expected("early", 2)
    manager.stop()
    thread.join(SOON)


def test_an_observer_that_raises_does_no_harm(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    served = serve()
    served.manager.observers.insert(0, lambda iteration, left: {}["nothing"])
    assert served.ask("a", 3).wait_for_completion(SOON) == expected("a", 3)
    assert served.left == ["a"]
    assert "KeyError" in caplog.text


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
    assert short.wait_for_completion(SOON) == expected("same", 2)
    assert long.wait_for_completion(SOON) == expected("same", 9)
    assert not any(answered_early)
    assert served.is_empty()


def test_a_request_that_can_never_fit_is_refused_with_numbers(serve: Serve) -> None:
    served = serve(pages=PagePool(5, 4))
    with pytest.raises(InferenceError, match=r"17 tokens.* 5 KV pages of 4 .*are 4\..*--kv-memory") as e:
        served.ask("big", 14)
    assert e.value.kind == "invalid_request_error"
    assert served.ask("fits", 13).wait_for_completion(SOON) == expected("fits", 13)


@pytest.mark.parametrize(("prompt", "num_tokens"), [(0, 3), (3, 0), (3, -1)])
def test_a_request_without_anything_to_compute_is_refused(serve: Serve, prompt: int, num_tokens: int) -> None:
    with pytest.raises(InferenceError, match=r"prompt has . tokens and num_tokens is") as caught:
        serve().ask("empty", num_tokens, prompt=prompt)
    assert caught.value.kind == "invalid_request_error"


def test_an_inference_finishes_once_whoever_comes_first() -> None:
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


def test_cancelling_after_the_answer_changes_nothing(serve: Serve) -> None:
    served = serve()
    done = served.ask("a", 2)
    done.wait_for_completion(SOON)
    done.cancel()
    assert done.wait_for_completion(0) == expected("a", 2)


@pytest.mark.parametrize(
    ("loop", "policy"), list(zip(["no_batching_loop", "static_batching_loop", "dynamic_batching_loop"], ALL))
)
def test_the_originals_loops_run_the_policy_of_their_name(loop: str, policy: str) -> None:
    manager = BatchingManager(
        FakeModel(),
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


def test_the_originals_names_are_there() -> None:
    assert batching.MAX_BATCH_SIZE >= 8
    asked = Inference("hello", 2, [5, 6, 7])
    assert (asked.prompt, asked.num_tokens, asked.data) == ("hello", 2, [5, 6, 7])
    assert asked.completion is None
    assert [asked.add_token(8), asked.add_token(9)] == [False, True]
    assert asked.data == [5, 6, 7, 8, 9]
    assert asked.finished()
    assert asked.wait_for_completion() == asked.completion == "hello"


def test_text_and_loops_want_what_makes_them() -> None:
    manager = BatchingManager(FakeModel())
    with pytest.raises(TypeError, match="make_inference"):
        manager.enqueue("text", 3)
    with pytest.raises(TypeError, match="make_policy"):
        manager.dynamic_batching_loop()


def test_callers_who_come_and_go_at_random_moments_are_all_answered(serve: Serve) -> None:
    served = serve("dynamic", slots=4, max_queue=1000)

    def call(i: int) -> str:
        asked = served.ask(f"r{i}", 1 + i % 7)
        if i % 3 == 0:
            asked.cancel()
        try:
            return asked.wait_for_completion(0 if i % 5 == 0 else SOON)
        except InferenceError as error:
            return error.kind

    with ThreadPoolExecutor(16) as callers:
        outcomes = list(callers.map(call, range(400)))
    allowed = [{expected(f"r{i}", 1 + i % 7), "cancelled", "timeout_error"} for i in range(400)]
    assert all(outcome in fine for outcome, fine in zip(outcomes, allowed))
    served.ask("last", 1).wait_for_completion(SOON)
    assert sorted(served.left) == sorted([*(f"r{i}" for i in range(400)), "last"])
    assert served.is_empty()


def test_waiting_tokens_are_bounded_too_but_one_request_always_fits(serve: Serve) -> None:
    served = serve("nobatch", slots=1, max_queue_tokens=20)
    running = served.hold()
    first = served.ask("long", 100)
    with pytest.raises(InferenceError, match="--max-queue-tokens") as full:
        served.ask("short", 1)
    assert full.value.kind == "overloaded"
    served.model.gate.set()
    for asked in (running, first):
        asked.wait_for_completion(SOON)
    assert served.ask("short", 1).wait_for_completion(SOON) == expected("short", 1)
