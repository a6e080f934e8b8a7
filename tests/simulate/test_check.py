"""The policy checker: it catches every planted fault, in plain words, and passes every policy that is shipped."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

import pytest
from hypothesis import settings

import policies
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.__main__ import main
from simulate.laws.case import Case, Request
from simulate.laws.cases import FEWER_RIVALS, RIVALS, describe, make_cases, make_large_cases
from simulate.laws.check import Verdict, check, check_exhaustively
from simulate.laws.exhaustive import Scope
from simulate.laws.laws import Broken
from simulate.laws.trial import try_case
from tests.support import points

MUTANTS = Path(__file__).parents[1] / "mutants"
WORK, DEADLINES = "no idle slot while a request fits", "deadlines"
LEAK, PROGRESS = "no page is leaked", "progress after each preemption"
TOKENS = "the same tokens as without preemption"
PLANTED = {
    "drops_the_last": ("", {WORK}),
    "drops_long_answers": ("", {WORK}),
    "breaks_its_claim": ("", {WORK}),
    "admits_one_too_many": ("", {"slots"}),
    "runs_finished": ("", {"no request runs after it finishes"}),
    "joins_twice": ("", {"no request twice in a step"}),
    "counts_prompts_twice": ("dynamic+", {"fair between clients"}),
    "never_lifts": ("dynamic+", {"fair between clients"}),
    "ignores_the_guard": ("dynamic+", {"starvation guard"}),
    "sleeps_past_its_deadline": ("", {DEADLINES}),
    "admits_none_when_woken": ("", {DEADLINES}),
    "reads_the_clock": ("", {"purity"}),
    "draws_lots": ("", {"purity"}),
    "sorts_by_address": ("", {"purity"}),
    "iterates_a_set": ("", {"repeatable"}),
    "frees_twice": ("", {"one outcome each"}),
    "starves_a_client": ("", {WORK, "no request starves"}),
    "holds_too_long": ("", {"slots of finished requests"}),
    "static_holds_too_long": ("", {"slots of finished requests"}),
    "exceeds_the_budget": ("", {"tokens of a step"}),
    "forgets_cancellations": ("", {"no request runs after it finishes"}),
    "pauses_all": ("", {"no crash"}),
    "preempts_forever": ("", {"no request starves", PROGRESS}),
    "preempts_before_a_token": ("", {PROGRESS}),
    "resumes_in_lost_pages": ("", {TOKENS}),
    "loses_a_page_of_its_victim": ("", {LEAK}),
    "crashes": ("", {"no crash"}),
    "ends_the_process": ("", {"no crash"}),
    "loses_one_after_100_joins": ("", {WORK}),
    "exceeds_the_budget_of_seven": ("", {"tokens of a step"}),
    "mixes_the_windows": ("dynamic+", {"overtaking"}),
    "refuses_long_prompts": ("", {"no request is refused"}),
    "refuses_who_could_be_on_time": ("", {"only the late are refused"}),
    "turns_away_who_waits": ("", {"no request is refused"}),
    "serves_the_last_first": ("", {"bounded overtaking"}),
}
OPTIONS = {
    "sleeps_past_its_deadline": {"delay": 20}, "admits_none_when_woken": {"delay": 20}, "mixes_the_windows": {"window": 5},
}  # fmt: skip

CASES = settings.default.max_examples  # as many as a property has examples
LOOPS = policies.names()
ORDERS = [f"dynamic+{order}" for order in policies.order_names()]
COMPOSED = [
    "nobatch+sjf", "static+sjf", "multibin+vtc", "static+vtc", "lightllm+vtc", "tgi+drr", "prefill-first+mlfq", "chunked+srpt",
    "multibin+edf", "bucket+priority", "static-exact+sjf", "window+lpm", "elastic+vtc-pred", "adaptive+rpm",
    "fixed+ssjf", "static-global+mlfq", "impatient+lcf",
    "tgi+prefix-tree", "bucket+prefix-tree", "baton+srpt", "econoserve+edf", "triton+vtc", "tgi+admission-control", "static+admission-control",
]  # fmt: skip
TUNED: list[tuple[str, dict[str, object]]] = [
    ("dynamic", {"reserve": "prompt"}),
    ("dynamic+srpt", {"reserve": "prompt"}),
    ("window", {"delay": "50", "preferred": "2,4"}),
    (
        "triton",
        {
            "priority_levels": 2,
            "timeout": "30,60",
            "timeout_action": "reject,delay",
            "allow_timeout_override": "on",
            "max_queue_size": 3,
            "delay": 40,
            "preferred": 2,
        },
    ),
    ("fixed", {"k": 3, "flush": 3600}),
    ("multibin", {"k": 2, "flush": 60}),
    ("static-global", {"n": 3, "flush": 100}),
    ("prefill-first", {"kv_tokens": 24, "max_batched_tokens": 8}),
    ("prefill-first+vtc", {"kv_tokens": 24}),
    ("chunked", {"max_batched_tokens": 3}),
    ("time-budget", {"itl": 15, "share": 0.5, "max_prompt_tokens": 3}),
    ("qoserve", {"itl": 15, "share": 0.5, "ttft": 40, "slo": 90, "interactive": "0,2", "guard": 150}),
    ("concur", {"start": 1, "every": 1, "guard": 50}),
    ("tgi", {"max_total_tokens": 30, "ratio": 1.2, "max_waiting": 3}),
    ("lightllm", {"pool": 30, "max_wait": 2, "per_client": 4}),
    ("lightllm+sjf", {"pool": 30, "max_wait": 2, "predictor": "learned"}),
    ("dynamic+sjf", {"predictor": "noisy", "sigma": 2}),
    ("dynamic+srpt", {"predictor": "learned"}),
    ("dynamic+sjf", {"guard": 20, "guard_ratio": 2}),
    ("dynamic+lpm", {"guard": 20}),
    ("dynamic+adapter-affinity", {"guard": 20}),
    ("dynamic+hrrn", {"guard": 20}),
    ("dynamic+vtc", {"weights": "b:2", "w_q": 1, "count_twice": "on"}),
    ("dynamic+vtc", {"weights": "b:2"}),
    ("dynamic+vtc", {"w_p": 5, "w_q": 0.5}),
    ("dynamic+vtc", {"cost": "profile"}),
    ("dynamic+vtc-pred", {"cost": "profile", "predictor": "uniform"}),
    ("dynamic+rpm", {"limit": 2}),
    ("dynamic+just-in-time", {"guard": 50, "slo": 40, "predictor": "noisy"}),
    ("dynamic+admission-control", {"slo": 60, "slack": 5}),
    ("dynamic+drr", {"quantum": 8}),
    ("dynamic+dlpm", {"quantum": 8, "weights": "b:2"}),
    ("dynamic+svf", {"threshold": 40, "guard": 20}),
    ("dynamic+boost", {"gamma": 0.02, "predictor": "classes", "guard": 200}),
    ("dynamic+justitia", {"guard": 60}),
    ("dynamic+mlfq", {"quantum": 20, "lift_every": 5}),
    ("dynamic+priority", {"aging": 50}),
    ("dynamic+prefix-tree", {"window": 20}),
    ("chunked+prefix-tree", {"window": 20, "max_batched_tokens": 3}),
    ("adaptive", {"target": 30, "every": 3}),
    ("baton", {"decoupled": "off"}),
    ("econoserve", {"max_batched_tokens": 8, "reserved": 0.3, "slo_range": 30, "predictor": "noisy", "sigma": 2}),
]


def planted(name: str) -> str:
    return f"{PLANTED[name][0]}{MUTANTS / name}.py"


def test_every_planted_fault_is_on_the_list() -> None:
    assert {path.stem for path in MUTANTS.glob("*.py")} == set(PLANTED)


@pytest.mark.parametrize(
    ("name", "options", "rivals"), [("dynamic", {}, FEWER_RIVALS), ("dynamic+vtc", {}, RIVALS), ("dynamic+lpm", {"guard": 20}, RIVALS)]
)  # fmt: skip
def test_clients_that_always_have_more_send_many_requests_where_a_policy_promises_who_is_not_left_behind(
    name: str, options: dict[str, object], rivals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases: list[int] = []
    monkeypatch.setattr("simulate.laws.check.try_case", lambda make, case, *more: cases.append(len(case.requests)))
    assert check(name, 40, large=0, options=options).broken is None
    assert cases[7::8] == [2 * rivals] * 5


SLOW = {
    "exceeds_the_budget_of_seven",
    "loses_one_after_100_joins",
    "mixes_the_windows",
}  # found after hundreds of cases
LARGE = {"refuses_long_prompts"}  # found in large cases alone


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in SLOW else ()) for name in PLANTED]
)
def test_a_planted_fault_is_caught(name: str) -> None:
    verdict = check(planted(name), 0 if name in LARGE else 400, options=OPTIONS.get(name))
    assert verdict.broken is not None
    assert verdict.broken.law in PLANTED[name][1], str(verdict)


def test_pages_that_the_scheduler_gives_back_twice_are_noticed() -> None:
    class Twice(Scheduler):
        def vacate(self, leaving):
            pages = [list(seq.pages) for seq in leaving]
            super().vacate(leaving)
            for freed in pages if self.pages else ():
                self.pages.release(freed)

    verdict = check("dynamic", 50, make_scheduler=Twice, large=0)
    assert verdict.broken is not None
    assert verdict.broken.law == "pages"


EVERY = [*LOOPS, *ORDERS, *COMPOSED]


@pytest.mark.parametrize("name", points(len(LOOPS) + len(ORDERS), *EVERY))
def test_every_policy_that_is_shipped_keeps_the_laws(name: str) -> None:
    assert check(name, CASES, seed=5, large=0).broken is None


# One large case for each policy, not the same one for all. A command below has one in the quick run.
@pytest.mark.full
@pytest.mark.parametrize(("seed", "name"), [pytest.param(seed, name, id=name) for seed, name in enumerate(EVERY)])
def test_every_policy_that_is_shipped_keeps_the_laws_in_large_cases(seed: int, name: str) -> None:
    assert check(name, 0, seed=seed, large=1 + seed % 2).broken is None


@pytest.mark.parametrize(("name", "options"), TUNED)
def test_the_laws_hold_with_other_options_too(name: str, options: dict[str, object]) -> None:
    assert check(name, CASES, seed=6, options=options, large=0).broken is None


@pytest.mark.full
@pytest.mark.parametrize(("name", "options"), TUNED)
def test_the_laws_hold_with_other_options_in_large_cases_too(name: str, options: dict[str, object]) -> None:
    assert check(name, 0, seed=6, options=options, large=1).broken is None


# Orders by length, deadline, priority or client pass a request as often as such requests arrive; these loops make groups.
UNBOUNDED = {"bucket", "multibin", "static-exact"} | {
    f"dynamic+{order}"
    for order in ("dlpm", "drr", "edf", "lcf", "mlfq", "priority", "srpt", "vtc", "vtc-plas", "vtc-pred")
}


def test_every_other_policy_claims_that_no_later_work_passes_a_request_beyond_its_guard_or_window() -> None:
    claims = {name: policies.get_policy(name, 4).claims for name in [*LOOPS, *ORDERS]}
    assert {name: c.overtaking_tokens for name, c in claims.items() if name not in UNBOUNDED} == dict.fromkeys(
        claims.keys() - UNBOUNDED, 0
    )
    assert {claims[name].overtaking_tokens for name in UNBOUNDED} == {inf}
    excepted = {name: min(c.guard, c.overtakes) for name, c in claims.items() if min(c.guard, c.overtakes) < inf}
    assert excepted == {
        "dynamic+sjf": 100, "dynamic+ssjf": 100, "dynamic+lpm": 100, "dynamic+adapter-affinity": 10, "dynamic+prefix-tree": 60,
        "dynamic+hrrn": 100, "dynamic+svf": 100, "dynamic+boost": 100, "dynamic+just-in-time": 100, "program-admission": 100, "concur": 100, "qoserve": 100,
        **dict.fromkeys([f"dynamic+{order}" for order in ("justitia", "program-fcfs", "plas", "atlas", "program-gittins", "program-srpt")], 100),
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(UNBOUNDED))
def test_a_bound_on_overtaking_that_a_policy_does_not_claim_would_not_hold(name: str) -> None:
    def claiming(slots: int) -> Policy:
        policy = policies.get_policy(name, slots)
        policy.claims = replace(policy.claims, overtaking_tokens=0)
        return policy

    def try_cases() -> None:
        for case in make_cases(400, 0):
            try_case(claiming, case, twice=False)

    with pytest.raises(Broken, match="bounded overtaking"):
        try_cases()


def test_the_work_that_may_pass_a_request_is_counted_in_tokens_of_prompts_and_answers() -> None:
    requests = tuple(Request(at, (0,) * size, n) for at, size, n in ((0, 1, 1), (0, 1, 1), (1, 4, 2), (2, 3, 5)))
    case = Case(requests, slots=1)

    def last_first(tokens: int) -> Callable[[int], Policy]:
        class Last(Policy):
            def __init__(self, slots: int) -> None:
                super().__init__(slots)
                self.claims = replace(self.claims, overtaking_tokens=tokens)

            def order(self, waiting: Collection[Sequence], now: float) -> list[Sequence]:
                return sorted(waiting, key=lambda seq: -seq.arrived_at)

        return Last

    try_case(last_first(14), case)
    with pytest.raises(Broken, match="14 tokens"):
        try_case(last_first(13), case)


def test_cases_come_from_the_seed_alone() -> None:
    assert list(make_cases(20, 3)) == list(make_cases(20, 3)) != list(make_cases(20, 4))
    assert list(make_large_cases(2, 3)) == list(make_large_cases(2, 3))


def test_large_cases_are_large() -> None:
    for case in make_large_cases(8, 0):
        assert case.slots == 64
        assert len(case.requests) == 1000
        assert max(len(r.prompt) for r in case.requests) == 2000


def test_the_smallest_case_is_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", planted("starves_a_client"), "--cases", "200"]) == 1
    told = capsys.readouterr().out
    assert "starves_a_client.py breaks a law" in told
    assert told.count(" arrives at ") == 1
    assert "r0 arrives at 0: prompt 1, output 1, client b" in told


@pytest.mark.full
def test_a_fault_that_takes_a_hundred_requests_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", planted("loses_one_after_100_joins"), "--cases", "0"]) == 1
    told = capsys.readouterr().out
    assert "r0 to r100 arrive at 0: prompt 1, output 1, client a" in told
    assert len(told.splitlines()) == 5


def test_a_fault_of_long_prompts_is_told_with_the_shortest_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", planted("refuses_long_prompts"), "--cases", "0"]) == 1
    assert "r0 arrives at 0: prompt 13, output 1, client a" in capsys.readouterr().out


def test_a_case_that_stays_large_is_summed_up() -> None:
    for case in make_large_cases(2, 0):
        lines = describe(case)
        assert len(lines) < 60
        assert "64 slots" in lines[0]
        assert any(" more, the last at " in line for line in lines)
        assert max(map(len, lines)) <= 120


def test_the_command_passes_a_good_policy_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--cases", "30", "--large-cases", "1"]
    assert main(["check", "window", *few, "--policy-option", "delay=20"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("window keeps every law in 30 small and 1 large cases\n")
    assert max(map(len, told.splitlines())) <= 80


@pytest.mark.parametrize(
    ("name", "is_claimed"), [("dynamic", True), ("dynamic+sjf", True), ("dynamic+vtc", False), ("lifo", False)]
)
@pytest.mark.parametrize(
    "check_some", [partial(check, cases=3, large=0), partial(check_exhaustively, scope=Scope(2, 1))]
)
def test_a_policy_is_told_which_laws_it_claims_and_which_not(
    name: str, is_claimed: bool, check_some: Callable[[str], Verdict], tmp_path: Path
) -> None:
    if name == "lifo":
        own = tmp_path / "lifo.py"
        lines = (MUTANTS / "serves_the_last_first.py").read_text().splitlines()
        own.write_text("\n".join(line for line in lines if "overtaking_tokens" not in line))
        name = str(own)
    claimed, others = str(check_some(name)).split("not claimed: ")
    assert ("bounded overtaking" in claimed) == is_claimed
    assert ("bounded overtaking" in others) != is_claimed
    assert ("fair between clients" in claimed) == (name == "dynamic+vtc")


def test_a_check_reports_each_case_that_it_has_tested() -> None:
    numbers: list[int] = []
    check("window", cases=2, large=0, progress=numbers.append)
    assert numbers == [1, 2]


def test_the_help_lists_the_options_of_all_policies_on_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    told = capsys.readouterr().out
    known = {field["name"] for name in [*LOOPS, *ORDERS] for field in policies.form_of(name)}
    assert known <= {line.split(":")[0].strip() for line in told.splitlines()}
    assert max(map(len, told.splitlines())) <= 80


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["dinamic"], "Did you mean 'dynamic'?"),
        (["window", "--policy-option", "dely=1"], "Did you mean 'delay'?"),
        (["no/such/file.py"], "there is no such file"),
        (["window", "--case", "3"], "Did you mean '--cases'?"),
        (["window", "--cases", "-3"], "at least 0"),
        (["window", "--cases", "0", "--large-cases", "0"], "Use --cases 100"),
        (["window", "--policy-option", "delay"], "Use NAME=VALUE, as in --policy-option delay=1"),
    ],
)
def test_the_command_says_what_is_wrong_with_itself(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *argv]) == 2
    assert words in capsys.readouterr().err
