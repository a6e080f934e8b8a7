"""Background work is computed while there is no other, and keeps its tokens when it gives way."""

from __future__ import annotations

import pytest

from scheduling.pages import PagePool
from tests.support import SOON
from tests.support.serving import Serve, expected, is_answered, kind_of

POLICIES = ["nobatch", "static", "dynamic", "chunked", "tgi", "dynamic+sjf", "dynamic+vtc", "dynamic+mlfq"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_takes_the_slots_of_background_work_which_goes_on_afterwards(serve: Serve, policy: str) -> None:
    served = serve(policy, slots=2)
    reached, go_on = served.pause_at(2)
    work = [served.ask(f"work{i}", 6, is_background=True) for i in range(3)]
    assert reached.wait(SOON)
    steps = len(served.model.computed)
    live = [served.ask(f"live{i}", 3) for i in range(2)]
    go_on.set()
    assert all(map(is_answered, live))
    assert all(map(is_answered, work))
    after = served.model.computed[steps:]
    last = max(i for i, plan in enumerate(after) if any(id.startswith("live") for id in plan))
    assert not any(id.startswith("work") for plan in after[: last + 1] for id in plan)
    assert served.is_empty()


def test_background_work_takes_no_place_from_others(serve: Serve) -> None:
    served = serve("dynamic", slots=1, max_queue=1, max_queue_tokens=10)
    served.hold()
    work = [served.ask(f"work{i}", 50, is_background=True) for i in range(20)]
    assert (served.manager.inbox.places.taken, served.manager.inbox.queued_tokens) == (1, 0)
    live = served.ask("live", 3)
    served.model.gate.set()
    assert is_answered(live)
    assert all(one.wait(SOON) for one in work)
    assert served.is_empty()
    assert served.manager.inbox.queued_tokens == 0


@pytest.mark.parametrize("is_running", [True, False])
def test_background_work_can_be_cancelled_whether_it_has_a_slot_or_not(serve: Serve, is_running: bool) -> None:
    served = serve("dynamic", slots=1)
    if not is_running:
        served.hold()
        served.ask("live", 5)
    else:
        served.model.gate.clear()
    work = served.ask("work", 50, is_background=True)
    if is_running:
        assert served.model.entered.wait(SOON)
    work.cancel()
    served.model.gate.set()
    assert kind_of(work) == "cancelled"
    assert served.ask("next", 1).wait_for_completion(SOON)
    assert served.is_empty()


def test_background_work_finds_its_pages_again(serve: Serve) -> None:
    served = serve("dynamic", slots=1, pages=PagePool(512, 4))
    reached, go_on = served.pause_at(40)
    work = served.ask("work", 60, is_background=True)
    assert reached.wait(SOON)
    live = served.ask("live", 2)
    go_on.set()
    assert live.wait_for_completion(SOON)
    assert is_answered(work)
    again = next(it for it in served.iterations if it.n > 40 and it.members[0].id == "work")
    assert again.members[0].tokens <= 4 + 1  # all but the last page was found


def test_copies_of_background_work_are_shared_among_themselves_only(serve: Serve) -> None:
    served = serve("dynamic", slots=2, dedup=lambda one: (one.is_background, one.num_tokens))
    served.hold("other", 1)
    work = [served.ask(f"work{i}", 4, is_background=True) for i in range(3)]
    live = served.ask("live", 4)
    work[0].cancel()
    served.model.gate.set()
    assert live.first is None
    assert is_answered(live)
    assert [one.first for one in work] == [None, work[0], work[0]]
    assert [one.wait_for_completion(SOON) for one in work[1:]] == [expected(f"work{i}", 4) for i in (1, 2)]
    assert served.is_empty()
