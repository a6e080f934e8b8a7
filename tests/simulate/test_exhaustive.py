"""Small scopes, gone through as a whole: what is shipped keeps the laws, and faults that chance misses are found."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from test_check import EVERY, LOOPS, ORDERS

from scheduling.policy import Policy
from scheduling.sequence import Sequence
from simulate.__main__ import main
from simulate.laws.check import check, check_exhaustively
from simulate.laws.exhaustive import Explored, Scope, explore

RARE = Path(__file__).parents[1] / "mutants" / "rare"
WORK = "no idle slot while a request fits"
WHOLE = [  # what takes under ten seconds of processor time
    "nobatch", "adaptive", "elastic", "impatient", "baton", "static", "chunked", "dynamic", "prefill-first", "tgi", "window",
    "lightllm", "bucket", "fixed", "triton", "dynamic+lpm", "dynamic+fcfs", "window+lpm", "dynamic+adapter-affinity",
    "dynamic+drr",
]  # fmt: skip
LAWS = {  # what catches a fault, and how many requests that takes
    "forgets_after_two": ({WORK, "no request starves"}, 3),
    "blocks_at_the_last_token": ({WORK}, 2),
    "loses_the_second_of_two": ({WORK}, 3),
    "keeps_a_slot_once": ({"slots of finished requests"}, 2),
    "forgets_whom_it_preempts": ({WORK}, 3),
    "refuses_when_idle": ({"no request is refused"}, 3),
    "ignores_draining": ({"no request starves"}, 3),
    "ages_a_step_late": ({"starvation guard"}, 4),
    "changes_its_mind": ({"overtaking"}, 4),
}


@pytest.mark.parametrize("name", LAWS)
def test_a_rare_fault_is_found_in_a_small_scope(name: str) -> None:
    laws, requests = LAWS[name]
    verdict = check_exhaustively(str(RARE / f"{name}.py"), Scope(requests, 2))
    assert verdict.broken is not None
    assert verdict.broken.law in laws
    assert verdict.case is not None
    assert len(verdict.case.requests) <= requests


def test_each_run_is_counted_as_it_ends() -> None:
    runs: list[int] = []
    verdict = check_exhaustively("dynamic", Scope(2, 2), progress=runs.append)
    assert runs == [*range(1, verdict.cases + 1)]


def test_that_the_last_is_first_is_found_with_three_requests(tmp_path: Path) -> None:
    file = tmp_path / "lifo.py"
    file.write_text((RARE.parent / "serves_the_last_first.py").read_text().replace("=20", "=0"))
    verdict = check_exhaustively(str(file), Scope(4, 2))
    assert verdict.broken is not None
    assert verdict.broken.law == "bounded overtaking"
    assert verdict.case is not None
    assert len(verdict.case.requests) == 3


@pytest.mark.full
@pytest.mark.parametrize("name", LAWS)
def test_random_cases_miss_a_rare_fault(name: str) -> None:
    assert check(str(RARE / f"{name}.py"), 60, large=0).broken is None


def test_every_rare_fault_is_on_the_list() -> None:
    assert {path.stem for path in RARE.glob("*.py")} == set(LAWS)


@pytest.mark.parametrize("name", [*LOOPS, *ORDERS])
def test_every_loop_and_order_keeps_the_laws_for_two_requests(name: str) -> None:
    verdict = check_exhaustively(name, Scope(2, 2))
    assert verdict.broken is None, str(verdict)


@pytest.mark.parametrize("name", ["dynamic", "static", "window", "dynamic+vtc"])
def test_a_policy_keeps_the_laws_for_three_requests(name: str) -> None:
    verdict = check_exhaustively(name, Scope(3, 2))
    assert verdict.broken is None, str(verdict)
    assert min(verdict.cases, verdict.states) > 30


@pytest.mark.full
@pytest.mark.parametrize("name", WHOLE)
def test_a_policy_keeps_the_laws_in_the_whole_scope(name: str) -> None:
    verdict = check_exhaustively(name)
    assert verdict.broken is None, str(verdict)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in EVERY if name not in WHOLE])  # `check --exhaustive` decides the rest
def test_a_policy_keeps_the_laws_for_three_requests_of_three_tokens(name: str) -> None:
    verdict = check_exhaustively(name, Scope(3, 3))
    assert verdict.broken is None, str(verdict)


class Looking(Policy):
    """A policy that does not look at its requests before `found` is called for one that finished."""

    def __init__(self, slots: int, found: Callable[[Looking, Sequence, float], bool]) -> None:
        super().__init__(slots)
        self.found, self.finished = found, list[tuple[int, int]]()

    def on_finish(self, seq: Sequence, now: float) -> None:
        assert not self.found(self, seq, now)


def explored(found: Callable[[Looking, Sequence, float], bool]) -> Explored:
    return explore(lambda slots: Looking(slots, found), Scope(2, 2, 1))


@pytest.mark.parametrize("shapes", [*product(product((1, 2), repeat=2), repeat=2)], ids=str)
def test_all_lengths_are_gone_through_although_they_are_chosen_late(shapes: tuple[tuple[int, int], ...]) -> None:
    def found(policy: Looking, seq: Sequence, now: float) -> bool:
        policy.finished.append((len(seq.prompt_ids), seq.max_tokens))
        return tuple(policy.finished) == shapes

    case = explored(found).case
    assert case is not None
    assert sorted((len(request.prompt), request.output) for request in case.requests) == sorted(shapes)


@pytest.mark.parametrize(
    "found",
    [
        lambda policy, seq, now: seq.id == "r1" and seq.max_tokens == 2,
        lambda policy, seq, now: (seq.client, seq.priority, len(seq.prompt_ids)) == ("b", 1, 2),
        lambda policy, seq, now: now - seq.arrived_at > 35,
        lambda policy, seq, now: seq.scheduled_at - seq.arrived_at == 24,
        lambda policy, seq, now: seq.last_token_at - seq.first_token_at == 12,
        lambda policy, seq, now: seq.deadline is not None and seq.deadline < now,
    ],
)
def test_what_a_policy_asks_of_a_request_only_at_the_end_tells_states_apart(
    found: Callable[[Looking, Sequence, float], bool],
) -> None:
    def late(policy: Looking, seq: Sequence, now: float) -> bool:
        policy.finished.append((0, 0))
        return len(policy.finished) == 2 and found(policy, seq, now)

    assert explored(late).broken is not None


def test_the_command_goes_through_a_scope(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "dynamic", "--exhaustive", "--requests", "2", "--longest", "2"]) == 0
    assert "all arrivals of up to 2 requests" in capsys.readouterr().out
    assert main(["check", str(RARE / "blocks_at_the_last_token.py"), "--exhaustive", "--requests", "2"]) == 1
    assert main(["check", "dynamic", "--requests", "2"]) == 2
    assert main(["check", "dynamic", "--exhaustive", "--cases", "2"]) == 2
