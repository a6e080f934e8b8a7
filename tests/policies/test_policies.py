"""Timelines by hand, the three basic loops, and how policies are found and take options."""

from __future__ import annotations

import math
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given

import policies
from scheduling.iteration import Plan
from scheduling.options import OptionError
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from tests.support.scheduling import Request, burst, drive, make_scheduler, requests
from tests.support.strategies import Pool, pools, slots, traces

TRACE_A = [(0, 4, 3), (5, 8, 1), (6, 2, 5), (60, 4, 2)]
TRACE_B = [(0, 5, 4), (1, 5, 6), (2, 5, 2), (3, 5, 1)]
# First token / finish of each request, then end of the run, steps, held slot-steps.
TIMELINES = """
A nobatch                             | 14/38 | 56/56   | 68/116 | 130/142 | 142 | 11 | 0
A static-exact                        | 14/38 | 56/56   | 68/116 | 130/142 | 142 | 11 | 0
A static                              | 14/38 | 64/120  | 64/120 | 134/146 | 146 | 10 | 4
A impatient                           | 14/38 | 64/64   | 64/120 | 134/146 | 146 | 10 | 4
A elastic                             | 14/38 | 64/64   | 64/112 | 126/138 | 138 | 10 | 0
A fixed k=2 flush=3600                | 31/59 | 31/59   | 78/134 | 78/134  | 134 | 8  | 5
A window delay=20                     | 31/59 | 31/59   | 71/119 | 133/145 | 145 | 10 | 2
A window delay=0                      | 14/38 | 64/120  | 64/120 | 134/146 | 146 | 10 | 4
A dynamic                             | 14/48 | 34/34   | 48/102 | 76/90   | 102 | 7  | 0
A prefill-first                       | 14/72 | 32/32   | 44/112 | 86/100  | 112 | 8  | 0
A chunked max_batched_tokens=6        | 14/46 | 46/46   | 58/112 | 86/100  | 112 | 8  | 0
A chunked max_batched_tokens=1000     | 14/48 | 34/34   | 48/102 | 76/90   | 102 | 7  | 0
A baton                               | 14/72 | 32/32   | 44/112 | 86/100  | 112 | 8  | 0
A baton decoupled=off                 | 14/56 | 41/41   | 56/113 | 87/101  | 113 | 7  | 0
A econoserve max_batched_tokens=6     | 14/46 | 46/46   | 58/112 | 86/100  | 112 | 8  | 0
B nobatch                             | 15/51 | 66/126  | 141/153 | 168/168 | 168 | 13 | 0
B nobatch+sjf                         | 15/51 | 108/168 | 81/93  | 66/66   | 168 | 13 | 0
B static                              | 15/51 | 71/141  | 71/141 | 156/156 | 156 | 11 | 4
B static+sjf                          | 15/51 | 100/160 | 71/85  | 71/85   | 160 | 12 | 1
B baton                               | 15/72 | 30/128  | 87/101 | 116/116 | 128 | 9  | 0
B econoserve                          | 15/60 | 32/108  | 77/91  | 108/108 | 108 | 7  | 0
B dynamic                             | 15/60 | 32/108  | 77/91  | 108/108 | 108 | 7  | 0
B dynamic+fcfs                        | 15/60 | 32/108  | 77/91  | 108/108 | 108 | 7  | 0
B dynamic+sjf                         | 15/63 | 78/138  | 49/63  | 32/32   | 138 | 10 | 0
"""


@pytest.mark.parametrize("line", TIMELINES.strip().splitlines())
def test_a_timeline_is_what_it_is_by_hand(line: str) -> None:
    said, *cells = (cell.strip() for cell in line.split("|"))
    trace, name, *options = said.split()
    policy = policies.get_policy(name, 2, dict(pair.split("=") for pair in options))
    sequences = requests(*(TRACE_A if trace == "A" else TRACE_B))
    run = drive(Scheduler(policy, None, 1 << 30), sequences)
    times = [f"{s.first_token_at}/{s.finished_at}" for s in sequences]
    assert [*times, str(run.now), str(len(run.iterations)), f"{run.held:g}"] == cells


@given(traces(), slots, pools())
def test_static_batches_start_and_end_together(trace: list[Request], slots: int, pool: Pool) -> None:
    run = drive(make_scheduler("static", slots, pool()), requests(*trace))
    for it in run.iterations:
        members = [m.id for m in it.members]
        assert it.joined in ([], members)
        assert sorted(id for id, _ in it.left) in ([], sorted(members))
    for _, batch in groupby(run.sequences, lambda s: s.first_iteration):
        batch = list(batch)
        assert len({s.finished_at for s in batch}) == 1
        assert {s.batch_sum / s.iterations for s in batch} == {len(batch)}


@given(traces(), slots)
def test_static_holds_every_slot_from_its_last_token_to_the_longest_members(trace: list[Request], slots: int) -> None:
    run = drive(make_scheduler("static", slots), requests(*trace))
    batches = [list(b) for _, b in groupby(run.sequences, lambda s: s.first_iteration)]
    wanted = sum(max(s.max_tokens for s in b) - s.max_tokens for b in batches for s in b)
    assert run.held == wanted


@given(traces(), slots)
def test_static_takes_the_oldest_that_wait_up_to_its_slots(trace: list[Request], slots: int) -> None:
    def planned(scheduler: Scheduler, plan: Plan) -> None:
        assert not (plan.joined and scheduler.waiting) or len(plan.joined) == slots

    run = drive(make_scheduler("static", slots), requests(*trace), planned=planned)
    assert [id for it in run.iterations for id in it.joined] == [s.id for s in run.sequences]


def test_a_slot_is_taken_again_in_the_next_iteration() -> None:
    run = drive(make_scheduler("dynamic", 1), requests((0, 3, 2), (0, 3, 2)))
    assert [it.members[0].id for it in run.iterations] == ["r0", "r0", "r1", "r1"]
    assert {it.members[0].slot for it in run.iterations} == {0}


def test_an_unknown_policy_is_refused_with_the_nearest_match() -> None:
    with pytest.raises(ValueError, match=r"'dinamic'.*mean 'dynamic'.*nobatch, .*static, "):
        policies.get_policy("dinamic", max_batch_size=3)


@pytest.mark.parametrize("name", ["__init__", "../stats", "", "static.Policy"])
def test_only_policies_are_imported(name: str) -> None:
    with pytest.raises(ValueError, match="unknown policy"):
        policies.check_name(name)


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_a_batch_size_of_zero_is_refused(policy: str) -> None:
    with pytest.raises(ValueError, match="max_batch_size is 0"):
        policies.get_policy(policy, max_batch_size=0)


def test_the_budget_is_shared_decodes_first_then_prompts_in_order() -> None:
    policy = policies.get_policy("dynamic", max_batch_size=8)
    first, decoding, second, third, done = (Sequence([7] * n, 5) for n in (6, 3, 5, 4, 2))
    decoding.computed, decoding.output_ids = 3, [1]
    done.computed, done.output_ids, done.finish_reason = 2, [1], "length"
    running = [first, decoding, second, third, done]
    assert policy.allocate_tokens(running, 10) == [6, 1, 3, 0, 0]
    assert policy.allocate_tokens(running, 100) == [6, 1, 5, 4, 0]


def test_options_are_read_from_text_and_held_to_their_bounds() -> None:
    policy = policies.get_policy("window", 4, {"delay": "0.02", "preferred": "2,4"})
    assert (policy.delay, policy.preferred) == (0.02, (2, 4))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"delay is '-1', .*must be at least 0.*Leave it out"):
        policies.get_policy("window", 4, {"delay": "-1"})
    with pytest.raises(ValueError, match=r"delay is 'nan'"):
        policies.get_policy("window", 4, {"delay": "nan"})
    with pytest.raises(ValueError, match=r"predictor is 'crystal', .*must be oracle or noisy"):
        policies.get_policy("dynamic+sjf", 4, {"predictor": "crystal"})
    with pytest.raises(ValueError, match=r"'wp'. Did you mean 'w_p'\? Use one of: weights, w_p, w_q"):
        policies.get_policy("dynamic+vtc", 4, {"wp": "1"})
    with pytest.raises(ValueError, match=r"no option 'k'"):
        policies.get_policy("dynamic", 4, {"k": "1"})
    for taken in ("self", "max_batch_size"):
        with pytest.raises(ValueError, match=f"no option '{taken}'.*--max-batch-size"):
            policies.get_policy("dynamic", 4, {taken: "1"})


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("econoserve", "slo", "inf"), ("econoserve", "slo", 1e308), ("dynamic+sjf", "guard", math.nan),
        ("dynamic+rpm", "period", 0), ("dynamic+rpm", "limit", 10**30), ("fixed", "flush", 1e9), ("window", "delay", "inf"),
        ("dynamic+drr", "weights", "a:1e-300"), ("dynamic+vtc", "w_q", 1e300), ("fixed", "k", "9" * 10_000),
        ("fixed", "k", 10**9999), ("fixed", "k", True), ("fixed", "k", None), ("fixed", "k", 2.5), ("fixed", "k", [2]),
        ("fixed", "k", "x" * 1_000_000), ("dynamic+drr", "weights", "a:1," * 100_000), ("dynamic+drr", "weights", 5),
        ("window", "preferred", "1," * 1_000_000), ("window", "preferred", [1] * 1_000_000), ("window", "preferred", [[1]]),
        ("baton", "decoupled", {"a": 1}), ("window", "x" * 1_000_000, 1), ("dynamic+sjf", "predictor", "y" * 1_000_000),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else "",
)  # fmt: skip
def test_an_option_that_the_arithmetic_of_a_policy_cannot_take_is_refused_in_few_words(
    name: str, option: str, value: object
) -> None:
    with pytest.raises(OptionError) as caught:
        policies.get_policy(name, 4, {option: value})
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("name", [*policies.names(), *(f"static+{o}" for o in policies.order_names())])
def test_every_policy_has_a_summary_and_documented_options(name: str) -> None:
    assert policies.summary(name).rstrip(".")
    for field in policies.form_of(name):
        assert field["bounds"]
        assert field["help"]
        assert policies.get_policy(name, 4, {str(field["name"]): field["default"]})


OWN = """
from scheduling import policy
from scheduling.options import option

class Policy(policy.Policy):
    most = option(3, "runs at once", low=1)

    def admit(self, waiting, running, budget, now):
        return max(0, min(self.most - len(running), budget.slots))
"""


def test_a_policy_of_ones_own_is_named_by_its_file_or_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_rooms").mkdir()
    path = tmp_path / "their_rooms" / "at_most.py"
    path.write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in (str(path), "their_rooms.at_most", f"{path}+sjf"):
        policy = policies.get_policy(name, 8, {"most": "2"})
        assert policy.name == ("at-most+sjf" if "+" in name else "at-most")
        run = drive(Scheduler(policy), burst((2, 5), (2, 4), (2, 1)))
        assert max(it.batch_size for it in run.iterations) == 2
    (field,) = policies.form_of(str(path))
    assert [field[key] for key in ("name", "default", "bounds", "help")] == ["most", "3", "at least 1", "runs at once"]
    with pytest.raises(ValueError, match="unknown policy"):
        policies.get_policy(str(path), 8, own=False)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("sjf", r"'sjf' is an order.*dynamic\+sjf"),
        ("sjf+static", r"'sjf' is an order.*static\+sjf"),
        ("dynamic+static", r"'static' is a policy.*static\+sjf"),
        ("+sjf", r"nothing before the \+.*dynamic\+sjf"),
        ("dynamic+", r"nothing after the \+.*dynamic\+sjf"),
    ],
)
def test_policies_and_orders_in_each_others_place_are_named(name: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        policies.check_name(name)


def test_a_policy_may_be_called_as_an_order_is(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [*policies.names(), "sjf"]
    monkeypatch.setattr(policies, "names", lambda: known)
    policies.check_name("sjf")


def test_a_file_without_a_policy_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("")
    with pytest.raises(ValueError, match=r"no class Policy that inherits from scheduling\.policy"):
        policies.get_policy(str(path), 8)
    with pytest.raises(ValueError, match=r"unknown order 'sjff'. Did you mean 'sjf'\?"):
        policies.get_policy("dynamic+sjff", 8)
    with pytest.raises(ValueError, match=r"policy dynamic\+sjf has no option 'most'"):
        policies.get_policy("dynamic+sjf", 8, {"most": "2"})
