"""Deduplication: equal inferences in flight are computed once, and no client notices the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import policies
from batching import Inference, InferenceError
from serving.dedup import Dedup
from serving.wakeup import Wakeup
from tests.support import SOON, in_background
from tests.support.serving import Serve, Served, is_answered, kind_of, raising


class Growing:
    """Text whose token n is the word n."""

    watches = False
    stop_reason = None

    def feed(self, token: int) -> str | None:
        return None

    def text(self, output_ids: list[int]) -> str:
        return "".join(f" {token}" for token in output_ids)


def same_number(inference: Inference) -> tuple[int, int]:
    return inference.num_tokens, inference.sequence.prompt_ids[0]


def request(kind: int, num_tokens: int, id: str, **options: Any) -> Inference:
    return Inference(f"{kind}:", num_tokens, [kind, 1, 2], id=id, text=Growing(), **options)


@pytest.fixture
def held(serve: Serve) -> Iterator[Callable[..., Served]]:
    """Return what starts a manager that deduplicates and whose model waits in the step of another request."""

    def start(policy: str = "dynamic", **options: Any) -> Served:
        served = serve(policy, dedup=same_number, **options)
        served.hold("other", 1)
        return served

    return start


@pytest.mark.parametrize("policy", ["nobatch", "static", "dynamic", "tgi", "dynamic+sjf", "dynamic+vtc"])
def test_four_hundred_copies_among_five_hundred_requests_are_computed_once(held: Any, policy: str) -> None:
    served = held(policy, slots=16, max_queue=1000)
    requests = [request(0 if i % 5 else i + 1, 4, f"r{i}") for i in range(500)]
    for one in requests:
        served.manager.enqueue(one)
    served.model.gate.set()
    assert {one.wait_for_completion(SOON) for one in requests if one.prompt == "0:"} == {"0: 0 1 2 3"}
    assert all(one.wait_for_completion(SOON) == f"{one.prompt} 0 1 2 3" for one in requests)
    computed = {id for plan in served.model.computed for id in plan} - {"other"}
    assert len(computed) == 101
    assert served.is_empty()
    assert sorted(served.left) == sorted(["other", *(one.id for one in requests)])
    assert (served.manager.dedup.copies, served.manager.dedup.tokens) == (399, 399 * 4)


def test_a_copy_knows_whose_answer_it_gets_and_what_is_complete_is_no_longer_shared(held: Any) -> None:
    served = held()
    first, copy = (served.manager.enqueue(request(0, 2, id)) for id in ("first", "copy"))
    assert (first.first, copy.first) == (None, first)
    served.model.gate.set()
    assert (copy.wait_for_completion(SOON), copy.finish_reason) == ("0: 0 1", "length")
    assert served.manager.enqueue(request(0, 2, "later")).first is None


def test_a_copy_of_an_answer_that_is_held_does_not_read_the_token_that_ended_it() -> None:
    class Inbox:
        def reserve(self, inferences: list[Inference]) -> None:
            """Have room for all."""

    dedup = Dedup(Inbox(), same_number)  # type: ignore[arg-type]
    first, copy = request(0, 9, "first"), request(0, 9, "copy", wakeup=Wakeup())
    dedup.reserve([first, copy])
    first.sequence.output_ids += [1, 2]
    first.sequence.finish_reason = "stop"
    assert not dedup.add(copy)
    assert (copy.ready, copy.output_ids) == (0, [1, 2])


@pytest.mark.parametrize("leaves", ["first", "copy", "other copy"])
def test_a_client_that_leaves_disturbs_no_copy_and_the_first_is_computed_to_the_end(held: Any, leaves: str) -> None:
    served = held()
    three = {id: served.manager.enqueue(request(0, 3, id)) for id in ("first", "copy", "other copy")}
    gone = three.pop(leaves)
    gone.cancel()
    served.model.gate.set()
    assert kind_of(gone) == "cancelled"
    assert [one.wait_for_completion(SOON) for one in three.values()] == ["0: 0 1 2"] * 2
    assert served.is_empty()


@pytest.mark.parametrize("order", [("first", "copy"), ("copy", "first")])
def test_what_all_clients_have_left_is_not_computed(held: Any, order: tuple[str, str]) -> None:
    served = held(slots=1)
    both = {id: served.manager.enqueue(request(0, 100, id)) for id in ("first", "copy")}
    for id in order:
        both[id].cancel()
    last = served.manager.enqueue(request(1, 2, "last"))
    served.model.gate.set()
    assert last.wait_for_completion(SOON) == "1: 0 1"
    assert [id for plan in served.model.computed for id in plan] == ["other", "last", "last"]
    assert served.is_empty()


def test_a_copy_of_what_was_abandoned_is_computed_itself(held: Any) -> None:
    served = held(slots=1)
    first = served.manager.enqueue(request(0, 100, "first"))
    first.cancel()
    served.model.gate.set()
    served.manager.enqueue(request(1, 1, "between")).wait_for_completion(SOON)
    again = served.manager.enqueue(request(0, 100, "again"))
    assert again.first is None
    assert is_answered(again)
    assert served.is_empty()


def test_a_stream_that_joins_late_gets_at_once_what_there_is(serve: Serve) -> None:
    served = serve("dynamic", dedup=same_number)
    reached, go_on = served.pause_at(2)
    first = served.manager.enqueue(request(0, 6, "first"))
    assert reached.wait(SOON)
    wakeup = Wakeup()
    wakeup.wants_tokens = True
    copy = served.manager.enqueue(request(0, 6, "copy", wakeup=wakeup))
    go_on.set()
    assert wakeup.wait(SOON)
    assert copy.ready >= 3
    assert copy.wait_for_completion(SOON) == first.wait_for_completion(SOON)
    assert copy.sequence.scheduled_at >= copy.sequence.arrived_at


def test_a_copy_that_ends_early_keeps_what_it_has_and_the_others_go_on(held: Any) -> None:
    served = held()
    first, early = (served.manager.enqueue(request(0, 3, id)) for id in ("first", "early"))
    early.end_early()
    served.model.gate.set()
    assert (early.wait_for_completion(SOON), early.finish_reason) == ("0:", "length")
    assert first.wait_for_completion(SOON) == "0: 0 1 2"
    assert served.is_empty()


def test_the_failure_of_a_request_is_that_of_its_copies(held: Any) -> None:
    served = held()
    first, copy = (served.manager.enqueue(request(0, 3, id)) for id in ("first", "copy"))
    served.model.breaks = raising(ValueError("this prompt"), lambda plan: plan.sequences[0].id == "first")
    served.model.gate.set()
    assert kind_of(first) == kind_of(copy) == "server_error"
    assert served.is_empty()


def test_a_copy_whose_time_in_the_queue_is_over_leaves_the_others(held: Any) -> None:
    served = held(slots=1)
    first = served.manager.enqueue(request(0, 3, "first"))
    late = served.manager.enqueue(request(0, 3, "late", queue_timeout=1e-6))
    served.model.gate.set()
    assert kind_of(late) == "timeout_error"
    assert first.wait_for_completion(SOON) == "0: 0 1 2"
    assert served.is_empty()


def test_a_copy_takes_a_place_in_the_queue_but_no_tokens(held: Any) -> None:
    served = held(slots=1, max_queue=2, max_queue_tokens=10)
    first, copy = (served.manager.enqueue(request(0, 5, id)) for id in ("first", "copy"))
    assert served.manager.inbox.queued_tokens == 8
    with pytest.raises(InferenceError, match="limit 3"):
        served.manager.enqueue(request(0, 5, "refused"))
    served.model.gate.set()
    assert first.wait_for_completion(SOON) == copy.wait_for_completion(SOON)
    assert served.is_empty()
    assert served.manager.inbox.queued_tokens == 0
    assert served.manager.enqueue(request(0, 5, "again")).first is None


def test_copies_within_one_request_count_once_and_a_refusal_leaves_no_trace(held: Any) -> None:
    served = held(slots=1, max_queue=2)
    choices = [request(0, 2, f"choice{i}") for i in range(3)]
    with pytest.raises(InferenceError):
        served.manager.enqueue_all(choices)
    pair = [request(0, 2, f"pair{i}") for i in range(2)]
    served.manager.enqueue_all(pair)
    assert [one.first for one in pair] == [None, pair[0]]
    served.model.gate.set()
    assert [one.wait_for_completion(SOON) for one in pair] == ["0: 0 1"] * 2
    assert served.is_empty()


def test_what_a_policy_refuses_is_refused_to_copies_as_well(serve: Serve) -> None:
    policy = policies.get_policy("dynamic+rpm", max_batch_size=4, options={"limit": "1"})
    served = serve(policy, dedup=same_number)
    served.model.gate.clear()
    served.manager.enqueue(request(1, 1, "first of the minute", client="greedy"))
    assert served.model.entered.wait(SOON)
    both = [served.manager.enqueue(request(0, 2, id, client="greedy")) for id in ("refused", "copy")]
    served.model.gate.set()
    assert [kind_of(one) for one in both] == ["overloaded"] * 2
    assert served.is_empty()


def test_a_stopped_loop_ends_copies_too(held: Any) -> None:
    served = held()
    both = [served.manager.enqueue(request(0, 3, id)) for id in ("first", "copy")]
    served.manager.inbox.stop()
    served.model.gate.set()
    assert [kind_of(one) for one in both] == ["unavailable_error"] * 2


def test_random_cancellations_among_copies_leave_every_other_answer_whole(serve: Serve) -> None:
    served = serve("dynamic", slots=3, max_queue=1000, dedup=same_number)
    requests = [request(i % 7, 5, f"r{i}") for i in range(400)]
    gone = [one for i, one in enumerate(requests) if i * 2654435761 % 3 == 0]
    for one in requests[:200]:
        served.manager.enqueue(one)
    with in_background(lambda: [one.cancel() for one in gone]):
        for one in requests[200:]:
            served.manager.enqueue(one)
    for one in requests:
        assert one.wait(SOON)
        assert one.error is not None or one.completion == f"{one.prompt} 0 1 2 3 4"
        assert one.error is None or one in gone
    served.manager.enqueue(request(7, 1, "last")).wait_for_completion(SOON)  # the loop has removed all before it
    assert sorted(served.left) == sorted(["last", *(one.id for one in requests)])
    assert served.is_empty()
