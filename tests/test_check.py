"""The policy checker: it catches every planted fault, in plain words, and passes every policy that is shipped."""

from __future__ import annotations

from pathlib import Path

import pytest

import policies
from scheduling.scheduler import Scheduler
from simulate.check import check, main, make_cases

MUTANTS = Path(__file__).parent / "mutants"
WORK, DEADLINES = "no idle slot while somebody fits", "deadlines"
PLANTED = {
    "drops_the_last": ("", {WORK}),
    "admits_one_too_many": ("", {"slots"}),
    "runs_finished": ("", {"nobody runs after its finish"}),
    "joins_twice": ("", {"nobody twice in a step"}),
    "counts_prompts_twice": ("dynamic+", {"fair between clients"}),
    "never_lifts": ("dynamic+", {"fair between clients"}),
    "ignores_the_guard": ("dynamic+", {"the guard against starvation"}),
    "sleeps_past_its_deadline": ("", {DEADLINES}),
    "wakes_in_vain": ("", {DEADLINES}),
    "reads_the_clock": ("", {"purity"}),
    "draws_lots": ("", {"purity"}),
    "sorts_by_address": ("", {"purity"}),
    "iterates_a_set": ("", {"the same again"}),
    "frees_twice": ("", {"one outcome each"}),
    "starves_a_client": ("", {WORK, "nobody starves"}),
    "holds_too_long": ("", {"slots of those who are done"}),
    "static_holds_too_long": ("", {"slots of those who are done"}),
    "exceeds_the_budget": ("", {"tokens of a step"}),
    "forgets_who_was_cancelled": ("", {"nobody runs after its finish"}),
    "pauses_everybody": ("", {"it keeps running"}),
    "displaces_for_ever": ("", {"nobody starves"}),
    "crashes": ("", {"it keeps running"}),
}
OPTIONS = {"sleeps_past_its_deadline": {"delay": 20}, "wakes_in_vain": {"delay": 20}}

LOOPS = policies.names()
ORDERS = [f"dynamic+{order}" for order in policies.order_names()]
COMPOSED = [
    "nobatch+sjf", "static+sjf", "multibin+vtc", "static+vtc", "lightllm+vtc", "tgi+drr", "prefill-first+mlfq", "chunked+srpt",
    "multibin+edf", "bucket+priority", "static-exact+sjf", "window+lpm", "elastic+vtc-pred", "adaptive+rpm",
    "fixed+ssjf", "static-global+mlfq", "impatient+lcf",
]  # fmt: skip
TUNED: list[tuple[str, dict[str, object]]] = [
    ("window", {"delay": "50", "preferred": "2,4"}),
    ("fixed", {"k": 3, "flush": "inf"}),
    ("multibin", {"k": 2, "flush": 60}),
    ("static-global", {"n": 3, "flush": 100}),
    ("prefill-first", {"kv_tokens": 24, "max_batched_tokens": 8}),
    ("prefill-first+vtc", {"kv_tokens": 24}),
    ("chunked", {"max_batched_tokens": 3}),
    ("tgi", {"max_total_tokens": 30, "ratio": 1.2, "max_waiting": 3}),
    ("lightllm", {"pool": 30, "max_wait": 2, "per_client": 4}),
    ("dynamic+sjf", {"predictor": "noisy", "sigma": 2}),
    ("dynamic+vtc", {"weights": "b:2", "w_q": 1, "count_twice": "on"}),
    ("dynamic+vtc", {"weights": "b:2"}),
    ("dynamic+vtc", {"w_p": 5, "w_q": 0.5}),
    ("dynamic+vtc", {"cost": "profile"}),
    ("dynamic+vtc-pred", {"cost": "profile", "predictor": "uniform"}),
    ("dynamic+rpm", {"limit": 2}),
    ("dynamic+drr", {"quantum": 8}),
    ("dynamic+mlfq", {"quantum": 20, "lift_every": 5}),
    ("dynamic+priority", {"aging": 50}),
    ("adaptive", {"target": 30, "every": 3}),
]


def planted(name: str) -> str:
    return f"{PLANTED[name][0]}{MUTANTS / name}.py"


def test_every_planted_fault_is_on_the_list() -> None:
    assert {path.stem for path in MUTANTS.glob("*.py")} == set(PLANTED)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_caught(name: str) -> None:
    verdict = check(planted(name), 400, options=OPTIONS.get(name))
    assert verdict.broken is not None
    assert verdict.broken.law in PLANTED[name][1], str(verdict)


def test_pages_that_the_scheduler_gives_back_twice_are_noticed() -> None:
    class Twice(Scheduler):
        def _take_off(self, leaving):
            pages = [list(seq.pages) for seq in leaving]
            super()._take_off(leaving)
            for freed in pages if self.pages else ():
                self.pages.release(freed)

    verdict = check("dynamic", 50, make_scheduler=Twice)
    assert verdict.broken is not None
    assert verdict.broken.law == "pages"


@pytest.mark.parametrize("name", [*LOOPS, *ORDERS, *COMPOSED])
def test_every_policy_that_is_shipped_keeps_the_laws(name: str) -> None:
    assert str(check(name, 48, seed=5)) == f"{name} keeps every law in 48 cases"


@pytest.mark.parametrize(("name", "options"), TUNED)
def test_the_laws_hold_with_other_options_too(name: str, options: dict[str, object]) -> None:
    assert check(name, 48, seed=6, options=options).broken is None


def test_cases_come_from_the_seed_alone() -> None:
    assert list(make_cases(20, 3)) == list(make_cases(20, 3)) != list(make_cases(20, 4))


def test_the_smallest_case_is_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([planted("starves_a_client"), "--cases", "200"]) == 1
    told = capsys.readouterr().out
    assert "starves_a_client.py breaks a law" in told
    assert told.count(" arrives at ") == 1
    assert "r0 arrives at 0: prompt 1, output 1, client b" in told


def test_the_command_passes_a_good_policy_with_its_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["window", "--cases", "30", "--policy-option", "delay=20"]) == 0
    assert capsys.readouterr().out == "window keeps every law in 30 cases\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["dinamic"], "Did you mean 'dynamic'?"),
        (["window", "--policy-option", "dely=1"], "Did you mean 'delay'?"),
        (["no/such/file.py"], "there is no such file"),
    ],
)
def test_the_command_says_what_is_wrong_with_itself(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert words in capsys.readouterr().err
