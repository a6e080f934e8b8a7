"""The loop qoserve: by hand, and goals met by three classes (Niyama, arXiv 2503.22562)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import policies
from costs import published
from costs.cost import Host
from scheduling.iteration import Plan
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.simulator import simulate


def knowing(**options: object) -> Any:
    """Return a policy that knows that a step takes 10 s, 2 more for each row and one for each prompt token."""
    policy: Any = policies.get_policy("qoserve", 4, options)
    policy.law.steps, policy.law._effects, policy.alone = 100, [10.0, 0.0, 256.0, 32.0, 0.0], 12.0
    policy.law.learn = lambda *step: None
    return policy


def request(name: str, prompt: int, output: int, priority: int, deadline: float | None = None) -> Sequence:
    return Sequence([1] * prompt, output, id=name, priority=priority, deadline=deadline)


def test_the_order_slides_from_the_earliest_goal_to_the_least_work_step_by_step() -> None:
    """By hand: goals are 100, 200 and 150, and work 10 + 50, 20 + 4 x 12 and 20 + 2 x 12 s. The last has no time for 140 s."""
    waiting = [
        request("first token", 50, 9, 1), request("answer", 10, 4, 2), request("deadline", 10, 2, 0, 150.0),
        request("hopeless", 10, 10, 2, 130.0),
    ]  # fmt: skip

    def order(now: float, count: int = 4, **options: object) -> list[str]:
        policy = knowing(**{"ttft": 100, "slo": 200, "guard": 1000, **options})
        return [seq.id for seq in policy.order(waiting[-count:], now)]

    assert order(0, alpha=0) == ["first token", "deadline", "answer", "hopeless"]
    # With 4: 150 + 4 x 44 < 100 + 4 x 60 < 200 + 4 x 68.
    assert order(0, alpha=4) == ["deadline", "first token", "answer", "hopeless"]
    assert order(0, alpha=4, interactive="2") == ["answer", "hopeless", "deadline", "first token"]
    # At 120 only one has time; the others go by work.
    assert order(120, alpha=0) == ["answer", "deadline", "first token", "hopeless"]
    assert order(120, alpha=0, guard=110) == ["first token", "answer", "deadline", "hopeless"]


def test_while_the_time_of_steps_is_unknown_the_earliest_goal_goes_first() -> None:
    policy = policies.get_policy("qoserve", 4, {"ttft": 100, "slo": 200})
    waiting = [request("late", 1, 1, 0), request("early", 900, 900, 1), request("past", 1, 1, 0, 10.0)]
    assert [seq.id for seq in policy.order(waiting, 50.0)] == ["early", "late", "past"]


def after_step(priority: int, deadline: float | None = None, **options: object) -> int:
    """Return the prompt tokens of the step after 100 beside a stream that has 3 of 10 tokens since 70, and came at 0."""
    policy = knowing(share=0, max_prompt_tokens=500, **options)
    stream, new = request("", 1, 10, priority, deadline), request("", 500, 10, 1)
    stream.output_ids, stream.computed, stream.first_token_at = [0, 0, 0], 3, 70.0
    policy.on_step(Plan(1, 80.0, [stream, new], [1, 8]), 100.0)
    return int(policy.max_batched_tokens) - 1


def test_prompts_get_the_slack_of_the_tightest_stream_by_its_goal_step_by_step() -> None:
    """By hand: a step of the stream alone takes 12 s, and a prompt token one more."""
    assert after_step(1, itl=20, ttft=80) == 80 + 3 * 20 - 100 - 12  # it is 10 s ahead of the goal for its first token
    assert after_step(1, itl=20, ttft=60) == 70 + 3 * 20 - 100 - 12  # and here behind it
    assert after_step(2, 240.0, itl=20) == 140 // 7 - 12  # seven tokens are left
    assert after_step(2, 120.0) == 1
    assert after_step(2, 90.0) == 500  # it is late anyway


TTFT, ITL, SLO = 2.0, 0.05, (10.0, 30.0)


def classes(rate: float, count: int, seed: int) -> list[Sequence]:
    """Return requests that arrive at random, one third with goals for tokens, the others with 10 and 30 s for the answer."""
    rng = np.random.default_rng(seed)
    made = []
    for number, at in enumerate(np.cumsum(rng.exponential(1 / rate, count)).tolist()):
        prompt, output, kind = int(rng.lognormal(6.2, 1.0)) + 1, int(rng.lognormal(4.3, 0.7)) + 1, int(rng.integers(3))
        goal = (TTFT + ITL * output, *SLO)[kind]
        prompt, output = min(prompt, 6000), min(output, 600)
        made.append(Sequence([0] * prompt, output, str(number), at, priority=kind + 1, deadline=at + goal))
    return made


def is_met(seq: Sequence) -> bool:
    if seq.finish_reason != "length" or seq.first_token_at is None or seq.finished_at is None:
        return False
    late = seq.priority == 1 and seq.first_token_at - seq.arrived_at > TTFT
    return not late and seq.finished_at <= (seq.deadline or 0.0)


def goodput(policy: str, rate: float, count: int = 400, seed: int = 0, **options: object) -> float:
    """Return the share of requests that meet their goals; those with goals for tokens give other policies a deadline."""
    made = policies.get_policy(policy, 32, options)
    run = simulate(
        Scheduler(made, None, 2048), classes(rate, count, seed), published.make("distserve-opt13b", {}), Host()
    )
    return sum(map(is_met, run.sequences)) / count


@pytest.mark.full
@pytest.mark.parametrize("load", [0.8, 1.2, 1.4])
def test_three_classes_meet_more_goals_than_by_deadline_alone_with_refusals_or_in_groups(load: float) -> None:
    capacity = 5.3  # requests per second that `chunked` ends when all are there at once
    found = {
        name: np.mean([goodput(name, load * capacity, seed=seed) for seed in range(2)])
        for name in ("chunked+edf", "chunked+admission-control", "econoserve", "qoserve")
    }
    assert found.pop("qoserve") > max(found.values())  # 0.89 and 0.86 at 1.2, 0.78 and 0.69 at 1.4
