"""Ten thousand requests, some poisoned, some canceled, while steps fail: each ends once, and only by its own fault.

The model says of each prompt a text of its own, so that a token that went to the wrong request would be seen; what it
says without faults is computed here, without a server.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import policies
from batching import BatchingManager, Inference, outcome
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.scheduler import Output
from scheduling.sequence import Sequence
from serving.inference import failure
from serving.recovery import Recovery
from tests.support import SOON
from tests.support.faults import Faults
from tests.support.scheduling import Request, make_scheduler, requests
from tests.support.serving import every_policy
from tests.support.strategies import traces

REQUESTS, POISONED, CANCELLED = 10_000, 50, 20  # one in so many
POISON = 7
CALLERS, AT_ONCE = 4, 50


@pytest.fixture(autouse=True, scope="module")
def silent() -> Iterator[None]:
    """Do not format the logs of some hundred failed steps."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def next_token(seq: Sequence) -> int:
    """Return a token that depends on all tokens of this sequence, and on no other sequence."""
    mixed = 17
    for id in (*seq.prompt_ids, *seq.output_ids):
        mixed = (mixed * 31 + id) % 50_021
    return mixed


def answer_to(prompt: list[int], tokens: int) -> list[int]:
    """Return the tokens of a prompt that is computed alone and without faults."""
    alone = Sequence(prompt, tokens)
    for _ in range(tokens):
        alone.output_ids.append(next_token(alone))
    return alone.output_ids


class Speaker:
    """The model without faults."""

    def forward(self, plan: Plan) -> list[Output]:
        return [next_token(seq) if count == seq.pending else None for seq, count in zip(plan.sequences, plan.counts)]


def faulty(**armed: Any) -> Any:
    """Return the model with faults; a prompt is poisoned by one of its ids."""
    return Faults(**armed).model(Speaker(), lambda ids: "POISON" if POISON in ids else "")


class Crowd:
    """Callers that send requests, cancel some of them, and wait for the rest."""

    def __init__(self, manager: BatchingManager) -> None:
        self.manager = manager
        self.left: Counter[str] = Counter()
        self.sent: list[Inference] = []
        manager.observers.append(lambda it, left: self.left.update(i.id for i in left))

    def call(self, caller: int) -> None:
        chance = random.Random(caller)
        for start in range(0, REQUESTS // CALLERS, AT_ONCE):
            batch = [self.ask(chance, f"{caller}-{start + i}") for i in range(AT_ONCE)]
            for inference in batch:
                if chance.randrange(CANCELLED) == 0:
                    inference.cancel()
            for inference in batch:
                assert inference.wait(SOON), "a request is lost"

    def ask(self, chance: random.Random, id: str) -> Inference:
        prompt = [chance.randrange(8, 999) for _ in range(chance.randint(1, 6))]
        if chance.randrange(POISONED) == 0:
            prompt[-1] = POISON
        inference = Inference("", chance.randint(1, 8), prompt, id=id)
        self.sent.append(inference)
        return self.manager.enqueue(inference)


@every_policy
@pytest.mark.full
def test_ten_thousand_requests_end_once_and_only_by_their_own_faults(policy: str) -> None:
    model = faulty(
        poison={"prompt_contains": "POISON"},
        fail_once={"after": 400},
        oom_once={"after": 900},
        oom_above={"batch": 6, "times": 30},
    )
    pages = PagePool(400, 4)
    manager = BatchingManager(model, pages=pages, max_batch_size=8, max_queue=1000)
    crowd = Crowd(manager)
    thread = manager.start(policies.get_policy(policy, max_batch_size=8))
    with ThreadPoolExecutor(CALLERS) as pool:
        list(pool.map(crowd.call, range(CALLERS)))
    manager.stop()
    thread.join(SOON)
    ends = Counter(map(outcome, crowd.sent))
    for inference in crowd.sent:
        right = answer_to(inference.sequence.prompt_ids, inference.num_tokens)
        assert inference.output_ids == right[: len(inference.output_ids)]
        end, poisoned = outcome(inference), POISON in inference.sequence.prompt_ids
        assert end in (("server_error", "cancelled") if poisoned else ("length", "cancelled"))
        assert end != "length" or inference.output_ids == right
    assert (len(crowd.sent), set(crowd.left.values())) == (REQUESTS, {1})
    assert set(crowd.left) == {inference.id for inference in crowd.sent}
    assert ends["server_error"] > REQUESTS / POISONED / 2
    assert ends["cancelled"] > REQUESTS / CANCELLED / 10
    assert (manager.inbox.failure, manager.waiting, pages.free) == (None, 0, pages.total)


passing, steps = st.sampled_from(["fail_once", "oom_once"]), st.integers(0, 30)


@every_policy
@given(traces(), st.integers(1, 5), st.sets(st.integers(0, 11)), passing, steps, st.integers(1, 5), steps)
def test_the_others_get_the_tokens_of_a_run_without_faults(
    policy: str, trace: list[Request], slots: int, poisoned: set[int], passes: str, after: int, most: int, times: int
) -> None:
    sequences = requests(*trace)
    for place in poisoned & set(range(len(sequences))):
        sequences[place].prompt_ids[-1] = POISON
    armed: dict[str, Any] = {
        "poison": {"prompt_contains": "POISON"}, passes: {"after": after}, "oom_above": {"batch": most, "times": times + 1},
    }  # fmt: skip
    model, now = faulty(**armed), [0.0]
    recovery = Recovery(model, lambda: Sequence([0], 1), lambda: now[0], lambda seconds: None)
    books = make_scheduler(policy, slots, PagePool(200, 4))
    for seq in sequences:
        books.add(seq)

    def compute(plan: Plan) -> list[Output]:
        now[0] += 100.0
        return recovery.compute(books, plan)

    while books.step(compute, lambda: now[0]):
        pass
    assert books.is_idle
    for seq in sequences:
        if POISON in seq.prompt_ids:
            assert (seq.output_ids, failure(seq.error).kind) == ([], "server_error")  # type: ignore[union-attr]
        else:
            assert seq.output_ids == answer_to(seq.prompt_ids, seq.max_tokens)
