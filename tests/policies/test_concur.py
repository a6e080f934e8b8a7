"""The loop concur: a window on active programs."""

from __future__ import annotations

from typing import Any

import numpy as np

import policies
from client.data import Call
from costs import published
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import UNKNOWN_TOKEN, Sequence
from simulate.rows import Rows
from simulate.simulator import simulate
from tests.support.scheduling import drive, make_scheduler, order_of_admission


def call(program: str, at: float, tokens: int = 8) -> Sequence:
    prompt = [sum(program.encode()) * 1000 + k for k in range(tokens)]
    return Sequence(prompt, 4, id=f"{program}{at:g}", arrived_at=at, program=program, session=program)


def test_calls_of_active_programs_pass_others_while_the_window_is_full() -> None:
    """By hand, a second a step: p and q fill a window of two when r comes at 1, so p's next call at 9 passes it.

    p is active until 20 s after its last call, at 13; when q leaves at 30, nothing runs, and r joins.
    """
    for window, admitted, joined_at in ((2, ["p0", "q0", "p9", "r1"], 30), (3, ["p0", "q0", "r1", "p9"], 1)):
        trace = [call("p", 0), call("q", 0), call("r", 1), call("p", 9, 16)]
        trace[1].max_tokens = 30
        scheduler = make_scheduler("concur", 3, PagePool(101, 4), start=window, idle=20)
        assert order_of_admission(drive(scheduler, trace, cost=lambda plan: 1)) == admitted
        assert trace[2].scheduled_at == joined_at


def served(policy: Any, program: str, at: float, cached: int) -> None:
    """Let a call of 100 tokens arrive, join and leave."""
    seq = call(program, at, 100)
    policy.on_arrival(seq, at)
    seq.cached, seq.scheduled_at = cached, at
    policy.on_admit(seq, at)
    seq.computed = 100
    policy.on_finish(seq, at + 1)


def test_the_window_grows_by_one_and_is_halved_step_by_step() -> None:
    policy: Any = policies.get_policy("concur", 8, {"every": 2})
    assert policy.window == 8
    for number, (cached, window) in enumerate(
        [(0, 8), (80, 8), (90, 9), (90, 9), (90, 10), (20, 10), (60, 5), (60, 5), (60, 3)]
    ):
        served(policy, "p", 10.0 * number, cached)  # the first call has no context yet
        assert policy.window == window, number
    policy._free = 0.05
    for number in (10, 11):
        served(policy, "p", 10.0 * number, 100)
    assert policy.window == 3  # the contexts are found, but no KV is left to spare


def test_programs_beyond_a_halved_window_pause_before_their_next_call() -> None:
    policy: Any = policies.get_policy("concur", 4, {"every": 4})
    for cached in (0, 0):
        for number, program in enumerate("pqrs"):
            served(policy, program, 10.0 * number + cached, cached)
    assert policy.window == 2
    assert len(policy._until) == 2


def agents(count: int, turns: int, seed: int) -> Rows:
    """Return agents with contexts that grow by some hundred tokens with each of their calls, and tools of 2 s between."""
    rng, calls, prompts = np.random.default_rng(seed), list[Call](), list[list[int]]()
    fresh = 1
    for number in range(count):
        prompt: list[int] = []
        for turn in range(turns):
            new = int(rng.integers(600, 1000) if turn == 0 else rng.integers(300, 600))
            prompt = [*prompt, *range(fresh, fresh + new)]
            fresh += new
            after = (len(calls) - 1,) if turn else ()
            name = f"agent-{number}"
            calls.append(Call(after, 2.0 if turn else 0.0, None, new, 32, 0.0, name, name, 0.0))
            prompts.append(prompt)
            prompt = [*prompt, *[UNKNOWN_TOKEN] * 32]
    sizes = np.array([*map(len, prompts)])
    return Rows(np.zeros(len(calls)), sizes, np.full(len(calls), 32), ids=prompts, calls=calls, closed=True)


def test_with_kv_for_a_few_agents_the_cache_collapses_without_a_window_and_not_with_it() -> None:
    found = {}
    for name in ("dynamic", "program-admission", "concur"):
        scheduler = Scheduler(policies.get_policy(name, 32), PagePool(5001, 16), 2048)
        run = simulate(scheduler, agents(40, 16, 0).sequences(), published.make("distserve-opt13b", {}))
        hits = sum(seq.cached for seq in run.sequences) / sum(len(seq.prompt_ids) for seq in run.sequences)
        found[name] = run.ended, hits
    (slow, miss), (also, _), (fast, hit) = found.values()
    assert miss < 0.1 < 0.6 < hit
    assert slow > 1.4 * fast
    assert also > 1.1 * fast
