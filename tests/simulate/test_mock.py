"""The model without weights: in the real loop, fast enough, and replayed by the simulator step for step."""

from __future__ import annotations

import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import policies
from batching import BatchingManager, Inference
from costs import mock
from costs.cost import Affine, Host, Sizes, to_dict
from costs.drafting import DrawnDrafter
from costs.mock import MockModel
from costs.published import Constant
from scheduling.iteration import Iteration, Plan
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from scheduling.speculation import Speculator
from simulate.simulator import simulate
from tests.support.simulate import replay, sequences


class VirtualClock:
    """A clock that only `sleep` moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def decoding(rows: int, context: int = 100) -> Plan:
    members = []
    for i in range(rows):
        seq = Sequence([i] * context, 1000, output_ids=[1])
        seq.computed = context
        members.append(seq)
    return Plan(1, 0.0, members, [1] * rows)


def test_it_takes_the_time_that_the_cost_says_and_gives_a_token_to_each_that_is_due() -> None:
    clock = VirtualClock()
    model = MockModel(Constant(0.5, 0.25), sleep=clock.sleep, clock=clock)
    plan = decoding(3)
    plan.counts[2], plan.sequences[2].output_ids = 40, []
    plan.sequences[2].computed = 0
    tokens = model.forward(plan)
    assert clock.now == 1.25
    assert [token is None for token in tokens] == [False, False, True]
    assert all(token in model.ids for token in tokens if token is not None)
    MockModel(Constant(0.5, 0.25), speed=10, sleep=clock.sleep, clock=clock).forward(decoding(2))
    assert clock.now == pytest.approx(1.25 + 0.1)


@pytest.mark.parametrize(
    ("oversleep", "between", "goes_on", "ends"),
    [
        (0.125, 0.0, True, [1.125, 2.125, 3.125, 4.125]),  # a sleep that lasts too long makes the next shorter,
        (0.0, 0.25, True, [1.0, 2.0, 3.0, 4.0]),  # and so does what the host does between two steps of a request;
        (0.0, 3.0, True, [1.0, 4.0, 7.0]),  # a host that is slower than the model sets the pace
        (0.0, 0.25, False, [1.0, 2.25, 3.5]),  # a step after an idle time takes its whole time
    ],
)
def test_steps_of_one_second_end_on_time(oversleep: float, between: float, goes_on: bool, ends: list[float]) -> None:
    clock, found = VirtualClock(), []
    model = MockModel(Constant(1.0, 0.0), sleep=lambda s: clock.sleep(s + oversleep), clock=clock)
    members = decoding(1).sequences
    for number in range(1, len(ends) + 1):
        members = members if goes_on else decoding(1).sequences
        model.forward(Plan(number, clock.now, members, [1]))
        members[0].last_iteration = number
        found.append(clock.now)
        clock.sleep(between)
    assert found == ends


def prompt(tokens: int) -> Sequence:
    return Sequence([1] * tokens, 100)


@pytest.mark.parametrize(
    ("joining", "constrained", "before", "host", "seconds"),
    [
        (0, False, 1, 0.5, 3.0),  # decodes were launched before the host had their tokens,
        (0, False, 1, 9.0, 9.0),  # but those after them were not
        (0, True, 1, 0.5, 3.5),  # none was, since a token waits for a mask,
        (0, False, 0, 0.5, 3.5),  # or since a request was paused
        (40, False, 1, 0.5, 7.0),  # a prompt that joins waits for the host, which is done before the decodes,
        (40, False, 1, 4.0, 8.0),  # or later
        (40, True, 1, 0.5, 7.5),
    ],
)
def test_only_decodes_are_a_step_ahead_of_the_host(
    joining: int, constrained: bool, before: int, host: float, seconds: float
) -> None:
    clock = VirtualClock()
    model = MockModel(Affine(base=1.0, decode=1.0, prompt=0.1), sleep=clock.sleep, clock=clock)
    members = decoding(2).sequences
    model.forward(Plan(1, 0.0, members, [1, 1]))
    members[0].constrained, members[0].last_iteration, members[1].last_iteration = constrained, before, 1
    ended = clock.now
    clock.sleep(host)
    members += [prompt(joining)] if joining else []
    model.forward(Plan(2, clock.now, members, [seq.pending for seq in members]))
    assert clock.now - ended == pytest.approx(seconds)


def test_the_prompt_of_a_request_that_goes_on_waits_for_the_host() -> None:
    clock = VirtualClock()
    model, seq = MockModel(Affine(base=1.0, prompt=0.1), sleep=clock.sleep, clock=clock), prompt(50)
    model.forward(Plan(1, 0.0, [seq], [20]))
    seq.computed, seq.last_iteration = 20, 1
    clock.sleep(0.5)
    model.forward(Plan(2, clock.now, [seq], [30]))
    assert clock.now == pytest.approx(3.0 + 0.5 + 4.0)


def test_a_token_depends_on_its_own_sequence_alone() -> None:
    model = MockModel(Constant(0.0, 0.0))
    alone, together = model.forward(decoding(1)), model.forward(decoding(5))
    assert together[0] == alone[0]
    assert len(set(together)) == 5


def test_its_own_work_takes_two_milliseconds_a_step_at_most_at_batch_64() -> None:
    model, plan = (MockModel(mock.load("mock:llm-mock").cost, sleep=lambda seconds: None), decoding(64))
    times = []
    for _ in range(50):
        start = time.thread_time()
        model.forward(plan)
        times.append(time.thread_time() - start)
    assert min(times) < 2e-3


def test_models_are_found_by_name_and_by_file(tmp_path: Path) -> None:
    assert mock.load("mock:llm-mock").cost.seconds.__self__.name == "llm-mock"
    path = tmp_path / "cost.json"
    facts = {"host": {"sigma": 0.25}, "machine": {"max_tokens_per_step": 256, "context": 8192, "kv_bytes": 23040}}
    path.write_text(json.dumps({"cost": to_dict(Affine(base=0.5)), **facts}))
    model = mock.load(f"mock:{path}")
    assert (model.cost, model.host, model.tokens_per_step) == (Affine(base=0.5), Host(sigma=0.25), 256)
    assert (model.name, model.sizes, model.speed) == ("mock:cost.json", Sizes(8192, 50257, 23040), 1)  # no path
    assert mock.load("mock:llm-mock").sizes.context == 1024
    fast = mock.load(f"mock:{path}@2.5")
    assert (fast.name, fast.speed) == ("mock:cost.json@2.5", 2.5)
    with pytest.raises(ValueError, match="must be above 0"):
        mock.load("mock:llm-mock@0")
    with pytest.raises(ValueError, match="Did you mean 'llm-mock'"):
        mock.load("mock:llm-moc")


@pytest.mark.parametrize(
    ("pages", "drafts"),
    [
        pytest.param(None, 3, id="three drafts"),
        pytest.param(None, None, id="as many drafts as are worth it"),
        pytest.param(16, 0, id="too few pages, so that requests are preempted"),
    ],
)
def test_in_front_of_a_mock_model_the_scheduler_takes_the_steps_of_the_simulator(
    pages: int | None, drafts: int | None
) -> None:
    law, clock = Affine(base=0.02, token=0.0001, row=0.0002, context=1e-7), VirtualClock()
    model = MockModel(law, sleep=clock.sleep, clock=clock)

    def scheduler(**options: Any) -> Scheduler:
        speculator = None if drafts == 0 else Speculator(DrawnDrafter(0.6, **options), drafts)
        policy = policies.get_policy("dynamic", 8, {"reserve": "prompt"} if pages else {})
        policy.margin = 16
        pool = PagePool(pages, 16, prefix_cache=False) if pages else None
        return Scheduler(policy, pool, 256, speculator=speculator)

    def arrivals() -> list[Sequence]:
        return sequences((0.05 * i, 9 + i % 7, 60 + i % 5) for i in range(40))

    run = simulate(scheduler(), arrivals(), law, records=True)
    engine, coming, found = scheduler(tokens=model.token), arrivals(), []
    while coming or not engine.is_idle:
        while coming and coming[0].arrived_at <= clock():
            engine.add(coming.pop(0))
        iteration = engine.step(model.forward, clock)
        if iteration is None:
            clock.now = coming[0].arrived_at
        else:
            found.append(iteration)
    assert [record.members for record in found] == [record.members for record in run.iterations]
    assert [record.t for record in found] == pytest.approx([record.t for record in run.iterations])
    assert any(seq.preemptions for seq in run.sequences) == bool(pages)


@pytest.fixture
def recorded(request: pytest.FixtureRequest) -> tuple[str, list[Sequence], list[Iteration]]:
    """Serve 40 requests by the real loop, its thread and a mock that sleeps; give arrivals and records."""
    name, model = request.param, MockModel(Constant(0.002, 0.0001))
    manager = BatchingManager(model, pages=PagePool(200, 16), max_batch_size=4)
    records: list[Iteration] = []
    rng = np.random.default_rng(5)
    inferences = [Inference("", int(rng.integers(1, 12)), [i] * int(rng.integers(1, 40)), id=str(i)) for i in range(40)]
    coming = iter(inferences)

    def observe(iteration: Iteration | None, left: list[Inference]) -> None:
        """Enqueue some in the loop's thread: what came while it planned a step would not be told apart by its time."""
        if iteration is None:
            return
        records.append(iteration)
        is_few = len(manager.inbox.open) < 3  # so that it goes on
        for inference in islice(coming, max(int(rng.integers(0, 3)), is_few)):
            manager.enqueue(inference)

    manager.observers.append(observe)
    manager.enqueue(next(coming))
    thread = manager.start(policies.get_policy(name, max_batch_size=4))
    for inference in inferences:
        assert inference.event_obj.wait(60)
    manager.stop()
    thread.join(60)
    return name, [inference.sequence for inference in inferences], records


@pytest.mark.parametrize("recorded", ["dynamic", "static", "chunked", "prefill-first"], indirect=True)
def test_a_recorded_run_is_replayed_batch_for_batch(recorded: tuple[str, list[Sequence], list[Iteration]]) -> None:
    """With the step times of the server, the scheduler admits the same and computes the same in every step."""
    name, served, records = recorded
    scheduler = Scheduler(policies.get_policy(name, max_batch_size=4), PagePool(200, 16))
    fresh = [Sequence(s.prompt_ids, s.max_tokens, id=s.id, arrived_at=s.arrived_at) for s in served]
    agreement = replay(scheduler, fresh, records)
    assert agreement.share == 1.0, agreement.first_difference
    assert agreement.steps > 40
    assert [s.scheduled_at for s in fresh] == [s.scheduled_at for s in served]


def test_a_replay_under_another_policy_names_the_first_difference() -> None:
    def trace() -> list[Sequence]:
        return [Sequence([1] * 4, 5, id=str(i), arrived_at=0.01 * i) for i in range(6)]

    scheduler = Scheduler(policies.get_policy("dynamic", max_batch_size=2))
    run = simulate(scheduler, trace(), Constant(), records=True)
    same = replay(Scheduler(policies.get_policy("dynamic", max_batch_size=2)), trace(), run.iterations)
    other = replay(Scheduler(policies.get_policy("static", max_batch_size=2)), trace(), run.iterations)
    assert (same.share, same.first_difference) == (1.0, "")
    assert other.share < 1
    assert other.first_difference.startswith("step ")
