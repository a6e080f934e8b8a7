"""A policy inside a stand-in of vLLM's scheduler: who joins, what happens when a hook fails, and that nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integrations.vllm import failsafe
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from tests.integrations.vllm.small_vllm import Status, request, small_vllm
from tests.support import wait_until


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with small_vllm() as adapter:

        def start(policy: str, record: str = "", options: dict[str, Any] | None = None, **sizes: int) -> Any:
            monkeypatch.setenv(
                adapter.SETTINGS, json.dumps({"policy": policy, "options": options or {}, "record": record})
            )
            return adapter.PolicyScheduler(**sizes)

        yield start


def step(scheduler: Any) -> dict[str, int]:
    output = scheduler.schedule()
    scheduler.update_from_output(output, None)
    counts: dict[str, int] = output.num_scheduled_tokens
    return counts


def run(scheduler: Any, steps: int = 200) -> list[dict[str, int]]:
    seen = []
    while scheduler.requests and len(seen) < steps:
        seen.append(step(scheduler))
    return seen


def policy_file(folder: Path, body: str) -> str:
    path = folder / "mine.py"
    path.write_text(f"from scheduling import policy\n\n\nclass Policy(policy.Policy):\n{body}", "utf-8")
    return str(path)


def test_the_shortest_answer_joins_first(make: Any) -> None:
    scheduler = make("dynamic+sjf", slots=1)
    for id, tokens in (("long", 9), ("short", 2)):
        scheduler.add_request(request(id, tokens=tokens))
    assert [list(counts) for counts in run(scheduler)] == [["short"]] * 2 + [["long"]] * 9


def test_a_static_batch_lets_nobody_join_until_it_has_ended(make: Any) -> None:
    scheduler = make("static")
    for i, tokens in enumerate((1, 4, 1)):
        scheduler.add_request(request(f"r{i}", tokens=tokens))
    assert [sorted(counts) for counts in run(scheduler)] == [["r0", "r1"], ["r1"], ["r1"], ["r1"], ["r2"]]


def test_prompts_are_cut_to_the_policys_tokens(make: Any) -> None:
    scheduler = make("chunked", tokens=64, options={"max_batched_tokens": 8})
    scheduler.add_request(request("a", prompt=20, tokens=2))
    assert [counts["a"] for counts in run(scheduler)] == [8, 8, 4, 1]


@pytest.mark.parametrize("policy", ["dynamic", "dynamic+sjf", "static", "nobatch", "chunked"])
@pytest.mark.parametrize("blocks", [100, 9])
def test_each_policy_decides_alike_outside_of_the_engine(make: Any, policy: str, blocks: int) -> None:
    inside = make(policy, slots=3, tokens=12, blocks=blocks)
    outside = Scheduler(failsafe.make_policy(policy, 3, {}), PagePool(blocks, 4, prefix_cache=False), 12, record=False)
    for i in range(9):
        prompt, tokens = 3 + i % 4, 1 + i % 3
        inside.add_request(request(f"r{i}", prompt=prompt, tokens=tokens))
        outside.add(Sequence([0] * prompt, tokens, id=f"r{i}", arrived_at=i))
        assert step(inside) == own_step(outside, now=i)
    while inside.requests:
        assert step(inside) == own_step(outside, now=9)
    assert outside.is_idle


def own_step(scheduler: Scheduler, now: float) -> dict[str, int]:
    """Let this project's scheduler take a step without an engine."""
    plan = scheduler.plan(now) or Plan(0, now, [], [])
    ends = [seq.computed + count >= seq.length for seq, count in zip(plan.sequences, plan.counts)]
    counts = {seq.id: count for seq, count in zip(plan.sequences, plan.counts)}
    if counts:
        scheduler.commit(plan, [7 if end else None for end in ends], now)
    return counts


def test_those_that_lose_their_blocks_are_served_to_the_end(make: Any) -> None:
    scheduler = make("dynamic", slots=4, blocks=9)
    for i in range(4):
        scheduler.add_request(request(f"r{i}", prompt=6, tokens=12))
    steps = run(scheduler)
    assert not scheduler.requests
    assert scheduler.get_num_free_blocks() == 8
    assert sum(counts.get("r3", 0) > 1 for counts in steps) >= 1
    assert not scheduler.plans.running


def test_a_request_that_is_aborted_leaves_no_view(make: Any) -> None:
    scheduler = make("dynamic")
    for id in "abc":
        scheduler.add_request(request(id))
    step(scheduler)
    for id in "ac":  # one that runs, and one that waits
        scheduler.finish_requests(id, Status.FINISHED_ABORTED)
    run(scheduler)
    assert not scheduler.views
    assert scheduler.plans.is_idle


@pytest.mark.parametrize(
    "body",
    [
        "    def order(self, waiting, now):\n        return 1 / 0",
        "    def order(self, waiting, now):\n        return [None]",
        "    def admit(self, waiting, running, budget, now):\n        return 'all'",
        "    def admit(self, waiting, running, budget, now):\n        return 0",
        "    def allocate_tokens(self, running, token_budget):\n        return [0] * len(running)",
        "    def allocate_tokens(self, running, token_budget):\n        return [-1]",
        "    def preempt(self, waiting, running, budget, now):\n        return [None]",
        "    def admit(self, waiting, running, budget, now):\n        raise SystemExit",
        "    def on_arrival(self, seq, now):\n        1 / 0",
        "    def on_arrival(self, seq, now):\n        raise SystemExit",
        "    def on_token(self, seq, now):\n        1 / 0",
        "    def release(self, running):\n        return running",
    ],
)
def test_a_policy_that_fails_loses_no_request_and_is_named(make: Any, tmp_path: Path, body: str) -> None:
    scheduler = make(policy_file(tmp_path, body))
    for i in range(5):
        scheduler.add_request(request(f"r{i}"))
    run(scheduler)
    assert not scheduler.requests
    assert scheduler.plans is not None
    assert sum(scheduler.faults.values()) >= 1


def test_a_hook_that_does_not_return_is_stopped(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failsafe, "HOOK_SECONDS", 0.2)
    scheduler = make(policy_file(tmp_path, "    def order(self, waiting, now):\n        while True:\n            pass"))
    scheduler.add_request(request("a"))
    run(scheduler)
    assert scheduler.faults == {"order": 1}
    assert not scheduler.requests


def test_without_its_books_vllm_goes_on_alone(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make("dynamic")
    for i in range(5):
        scheduler.add_request(request(f"r{i}"))
    step(scheduler)
    monkeypatch.setattr(scheduler.plans, "commit", lambda *given: 1 / 0)
    run(scheduler)
    assert scheduler.plans is None
    assert not scheduler.requests


def test_if_the_books_fail_while_a_request_is_refused_vllm_goes_on_alone(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make("dynamic+rpm", options={"limit": 1})
    monkeypatch.setattr(scheduler.plans, "remove_all", lambda *given: 1 / 0)
    for id in "ab":
        scheduler.add_request(request(id, client="alice"))
    run(scheduler)
    assert scheduler.plans is None
    assert scheduler.faults == {"ZeroDivisionError": 1}
    assert not scheduler.requests


def test_a_limit_within_a_limit_leaves_the_outer_one_running(make: Any) -> None:
    scheduler, left, before = make("dynamic"), list[float](), signal.getitimer(signal.ITIMER_REAL)[0]

    def outer() -> None:
        scheduler.safely(lambda: None)
        left.append(signal.getitimer(signal.ITIMER_REAL)[0])

    scheduler.safely(outer)
    left.append(signal.getitimer(signal.ITIMER_REAL)[0])
    assert left[0] > 0
    assert (left[1] > 0) == (before > 0)


def test_steps_that_vllm_never_computes_are_not_kept(make: Any) -> None:
    scheduler = make("dynamic", tokens=8)
    scheduler.add_request(request("a", prompt=40))
    outputs = [scheduler.schedule() for _ in range(5)]
    scheduler.update_from_output(outputs[3], None)
    assert [own is outputs[4] for own, *_ in scheduler._planned] == [True]


def test_a_refused_request_is_answered_and_uses_nothing(make: Any) -> None:
    scheduler = make("dynamic+rpm", options={"limit": 1})
    scheduler.add_request(request("a", client="alice"))
    scheduler.add_request(request("b", client="alice"))
    outputs = scheduler.update_from_output(scheduler.schedule(), None)
    assert outputs[0].outputs == ["b"]
    assert list(scheduler.requests) == ["a"]


def test_the_record_has_no_prompt_and_a_file_beside_it_switches_the_policy(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    Path(f"{path}.policy").write_text('{"policy": "static"}', "utf-8")  # left by an earlier run
    os.utime(f"{path}.policy", (1, 1))
    scheduler = make("dynamic", record=str(path), slots=1)
    for id, tokens in (("a", 2), ("long", 9), ("short", 2)):
        scheduler.add_request(request(id, tokens=tokens, program="agent"))
    step(scheduler)
    Path(f"{path}.policy").write_text('{"policy": "dynamic+sjf"}', "utf-8")
    scheduler.record._looks_at = 0.0
    run(scheduler)
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [line["arrive"] for line in lines if "arrive" in line] == ["a", "long", "short"]
    assert {line["program"] for line in lines if "arrive" in line} == {"agent"}
    assert not [line for line in lines if "prompt_ids" in line]
    assert [id for line in lines for id in line.get("joined", ())] == ["a", "short", "long"]
    assert [line["switch"]["policy"] for line in lines if "switch" in line] == ["dynamic+sjf"]


class Leasing:
    """A vLLM whose own policy counts what ended, and a client that leases others by the file beside the record."""

    def __init__(self, make: Any, folder: Path) -> None:
        self.record = folder / "record"
        counts = "    finished = 0\n\n    def on_finish(self, seq, now):\n        self.finished += 1"
        self.vllm = make(policy_file(folder, counts), record=str(self.record))
        self.own = self.vllm.plans.policy

    def ask(self, **wish: Any) -> Any:
        """Let vLLM read a wish in its next step; return the policy that serves then."""
        Path(f"{self.record}.policy").write_text(json.dumps(wish), "utf-8")
        self.vllm.record._looks_at, self.vllm.record._seen = 0.0, 0
        step(self.vllm)
        return self.vllm.plans.policy

    def lend(self, policy: str, seconds: float = 600.0, **more: Any) -> Any:
        return self.ask(policy=policy, lease="a", until=time.time() + seconds, **more)

    @property
    def switches(self) -> list[dict[str, Any]]:
        return [line for line in map(json.loads, self.record.read_text("utf-8").splitlines()) if "switch" in line]


@pytest.fixture
def leasing(make: Any, tmp_path: Path) -> Leasing:
    return Leasing(make, tmp_path)


def test_vllm_goes_back_by_itself_to_the_object_with_what_it_has_learned(leasing: Leasing) -> None:
    leasing.vllm.add_request(request("a"))
    run(leasing.vllm)
    leasing.vllm.add_request(request("b", tokens=100))
    assert leasing.lend("dynamic+sjf", seconds=0.2).name == "dynamic+sjf"
    wait_until(lambda: step(leasing.vllm) is not None and leasing.vllm.plans.policy is leasing.own)
    assert leasing.own.finished == 1
    leased, back = leasing.switches
    assert (leased["lease"], "lease" in back, Path(back["switch"]["policy"]).name) == ("a", False, "mine.py")
    assert leasing.lend("static", seconds=-1.0) is leasing.own  # vLLM had nothing to do meanwhile
    run(leasing.vllm)
    assert leasing.own.finished == 2


def test_who_has_the_lease_renews_and_ends_it_and_nobody_else_switches(leasing: Leasing) -> None:
    leasing.lend("dynamic+sjf")
    lent = leasing.lend("static", renews=True)
    end = leasing.vllm.fallback.ends_at
    for wish in ({"policy": "dynamic"}, {"policy": "dynamic", "lease": "b", "until": end}, {"lease": "b"}):
        assert leasing.ask(**wish) is lent
    assert (lent.name, leasing.vllm.fallback.ends_at) == ("static", end)
    assert leasing.ask(lease="a") is leasing.own
    assert leasing.lend("static", renews=True) is leasing.own  # it has ended


def test_a_leased_policy_that_fails_ends_the_lease_and_is_named(leasing: Leasing, tmp_path: Path) -> None:
    leasing.lend(policy_file(tmp_path, "    def order(self, waiting, now):\n        return 1 / 0"))
    leasing.vllm.add_request(request("a"))
    run(leasing.vllm)
    assert leasing.vllm.plans.policy is leasing.own
    assert (leasing.switches[-1]["failure"]["hook"], "lease" in leasing.switches[-1]) == ("order", False)
    assert leasing.ask(policy="dynamic").name == "dynamic"
