"""What clients see of a request that lost its KV pages and is computed again: nothing, but that it takes longer."""

from __future__ import annotations

from batching import Inference
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.scheduler import Output
from serving.wakeup import Wakeup
from tests.support import SOON, wait_until
from tests.support.serving import Serve, Served, inference, kind_of

PAGES = 9  # of four tokens, of which one is for padding


def crowded(serve: Serve, **options: float) -> Served:
    """Return a manager with pages for one request, where two may join; its model waits for `gate.set`."""
    served = serve("dynamic", 2, pages=PagePool(PAGES, 4), **options)
    served.manager.policy.margin = 1
    served.model.gate.clear()
    return served


def ask_two(served: Served) -> list[Inference]:
    both = [inference(id, 24, prompt=8, open_ended=True, wakeup=Wakeup()) for id in ("first", "second")]
    both[1].sequence.prompt_ids[0] = 100  # no shared pages
    served.manager.enqueue_all(both)
    return both


def test_a_reader_sees_each_token_once_across_a_preemption(serve: Serve) -> None:
    served = crowded(serve)
    seen: dict[str, list[int]] = {"first": [], "second": []}
    both = ask_two(served)
    served.model.gate.set()
    for each in both:
        assert each.wakeup is not None
        while not each.is_finished:
            each.wakeup.wants_tokens = True
            if len(each.output_ids) == len(seen[each.id]):
                each.wakeup.wait(0.05)
            seen[each.id] += each.output_ids[len(seen[each.id]) : each.ready]
        seen[each.id] += each.output_ids[len(seen[each.id]) :]
    assert seen == {"first": list(range(24)), "second": list(range(24))}
    assert [each.sequence.preemptions > 0 for each in both] == [False, True]
    wait_until(served.is_empty)


def test_a_request_is_cancelled_while_it_waits_after_a_preemption(serve: Serve) -> None:
    served = crowded(serve)
    first, second = ask_two(served)

    def cancel(plan: Plan, outputs: list[Output]) -> list[Output]:
        if second.sequence in plan.preempted:
            second.cancel()
        return outputs

    served.model.breaks = cancel
    served.model.gate.set()
    assert kind_of(second) == "cancelled"
    assert first.wait(SOON)
    assert (first.error, len(first.output_ids)) == (None, 24)
    wait_until(served.is_empty)


def test_the_limit_on_the_queue_spares_a_request_that_had_begun(serve: Serve) -> None:
    now = [0.0]
    served = crowded(serve, queue_timeout=5.0, clock=lambda: now[0])
    first, second = ask_two(served)

    def late(plan: Plan, outputs: list[Output]) -> list[Output]:
        if second.sequence.preemptions:
            now[0] += 100.0
        return outputs

    served.model.breaks = late
    served.model.gate.set()
    assert first.wait(SOON)
    assert second.wait(SOON)
    assert (first.error, second.error) == (None, None)
    assert second.sequence.preemptions == 1
    assert second.output_ids == list(range(24))


def test_a_preempted_request_that_fits_no_more_waits_until_the_other_has_left(serve: Serve) -> None:
    served = crowded(serve)
    first, second = ask_two(served)
    served.model.gate.set()
    assert first.wait(SOON)
    assert second.wait(SOON)
    left = next(it for it in served.iterations if ("first", "length") in it.left)
    again = next(it for it in served.iterations if "second" in it.joined and it.n > 1)
    assert (again.n, second.error) == (left.n + 1, None)
    assert served.pages.pages_for(second.sequence.total) == served.pages.total
