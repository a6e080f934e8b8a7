"""The loop time-budget, and the time of steps that it learns."""

from __future__ import annotations

import random
from typing import Any

import pytest

import policies
from costs import published
from costs.cost import Host
from costs.steps import Step
from integrations.queue.menu import Menu, Shared
from integrations.vllm.failsafe import make_policy
from policies._step_time import StepTime
from scheduling.iteration import Plan
from scheduling.scheduler import Output, Scheduler
from scheduling.sequence import Sequence
from simulate import workloads
from simulate.simulator import Simulation


def knowing(**options: object) -> Any:
    """Return a policy that knows that a step takes 10 s, 2 more for each row and one for each prompt token."""
    policy: Any = policies.get_policy("time-budget", 4, options)
    policy.law.steps, policy.law._effects = 100, [10.0, 0.0, 256.0, 32.0, 0.0]
    policy.law.learn = lambda *step: None
    return policy


def after_step(policy: Any, prompt: int, seconds: float) -> int:
    """Return the limit after a step, which ends at 100, of `prompt` prompt tokens beside a stream that has 3 tokens since 70."""
    stream, new = Sequence([1], 10), Sequence([1] * 500, 10)
    stream.output_ids, stream.computed, stream.first_token_at = [0, 0, 0], 3, 70.0
    new.computed = prompt
    policy.on_step(Plan(1, 100.0 - seconds, [stream, new], [1, prompt]), 100.0)
    return int(policy.max_batched_tokens)


def test_prompts_get_the_time_that_the_tightest_stream_has_left_step_by_step() -> None:
    """By hand: the fourth token is due at 70 + 3 x 20 = 130, and a step without prompts takes 12 s: so 18 prompt tokens."""
    assert after_step(knowing(itl=20, share=0), 8, 20.0) == 1 + 18
    assert after_step(knowing(itl=1000, share=0, max_prompt_tokens=100), 8, 20.0) == 1 + 100
    assert after_step(knowing(itl=0, share=0), 8, 20.0) == 1 + 1  # one at least


def test_prompts_get_their_share_of_the_time_step_by_step() -> None:
    """By hand: 8 of 20 s are the share of 0.4. After 4 of 16 s, 2.4 s are owed, of which one counts: (4.8 + 1) / 0.6."""
    policy = knowing(itl=0, share=0.4)
    policy.max_batched_tokens = 9
    assert after_step(policy, 8, 20.0) == 1 + 8
    policy.max_batched_tokens = 5
    assert after_step(policy, 4, 16.0) == 1 + 9
    policy.max_batched_tokens, policy._owed = 9, 0.0
    assert after_step(policy, 4, 16.0) == 1 + 8  # all that waited was computed, so nothing is owed


def test_the_time_of_steps_is_learned_and_follows_a_change() -> None:
    rng, law = random.Random(1), StepTime()
    for scale in (1.0, 2.0):
        for _ in range(1500):
            prompt, rows = rng.choice((0, 0, rng.randint(1, 2000))), rng.randint(1, 60)
            context = rows * rng.randint(10, 900)
            true = scale * (0.02 + 0.002 * bool(prompt) + 1e-4 * prompt + 3e-4 * rows + 1e-6 * context)
            law.learn(prompt, rows, context, true * rng.uniform(0.97, 1.03))
        assert law.seconds(512, 20, 8000) == pytest.approx(scale * 0.0872, rel=0.04)
        assert law.seconds(0, 20, 8000) == pytest.approx(scale * 0.034, rel=0.04)
        assert law.prompt_tokens(scale * 0.0532) == pytest.approx(512, rel=0.06)
    before = law.seconds(512, 20, 8000)
    law.learn(512, 20, 8000, 100.0)  # a step that was disturbed
    assert law.seconds(512, 20, 8000) < 1.2 * before


class Watched(Simulation):
    """Notes for each step that had prompts for all of its budget: when it began, its seconds, and those of its prompts."""

    def __init__(self, scheduler: Scheduler, arrivals: list[Sequence]) -> None:
        super().__init__(scheduler, arrivals, published.make("distserve-opt13b", {}), Host())
        self.found: list[tuple[float, float, float]] = []

    def compute_one(self, plan: Plan, seconds: float) -> list[Output]:
        rows = [seq for seq in plan.sequences if not seq.is_prefilling]
        if rows and sum(plan.counts) >= self.scheduler.policy.max_batched_tokens:
            alone = self.cost.seconds(Step(len(rows), sum(seq.length for seq in rows)))
            self.found.append((self.now, seconds, seconds - alone))
        return super().compute_one(plan, seconds)


@pytest.mark.parametrize(("share", "rate"), [(0.2, 4.0), (0.2, 9.0), (0.4, 9.0)])
def test_the_share_of_prompts_is_kept_within_3_points_over_windows_of_10_seconds(share: float, rate: float) -> None:
    policy = policies.get_policy("time-budget", 32, {"itl": 0.001, "share": share})
    run = Watched(Scheduler(policy, None, 4096), workloads.draw("fastgen:60", rate, 300, 0).sequences())
    run.run()
    windows: dict[int, list[float]] = {}
    for at, seconds, spent in run.found:
        total = windows.setdefault(int(at // 10), [0.0, 0.0])
        total[0], total[1] = total[0] + seconds, total[1] + spent
    full = [spent / seconds for seconds, spent in windows.values() if seconds > 8]
    assert len(full) >= 2
    assert max(abs(each - share) for each in full) < 0.03


@pytest.mark.parametrize("name", ["time-budget", "time-budget+sjf", "qoserve", "qoserve+sjf"])
def test_it_is_refused_where_steps_overlap_or_are_not_seen(name: str) -> None:
    with pytest.raises(ValueError, match="seconds of each step, which overlap in vLLM"):
        make_policy(name, 4, {})
    with pytest.raises(ValueError, match="seconds of each step, which the upstream does not tell"):
        Menu().get_policy(name, 4)
    assert name.partition("+")[0] not in Menu().names()
    assert Shared().get_policy(name, 4).name == name  # the servers run the loop
