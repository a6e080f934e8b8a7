"""Users' policy files that still use former names work as they did, and a warning names the new ones."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from driver import drive, requests

import policies
from scheduling.renamed import RenamedWarning
from scheduling.scheduler import Scheduler
from simulate.__main__ import main
from simulate.laws.check import check

OLD = '''
"""A policy written before the names changed."""

from scheduling import policy
from scheduling.policy import Room


class Policy(policy.Policy):
    apart = True
    conserving = False
    heeds = ("priority",)
    patience = 7.0

    def __init__(self, max_batch_size, **options):
        super().__init__(max_batch_size, **options)
        self.heard = []
        self.displaces = max_batch_size > 1
        self.patience = 9.0

    def obstacle(self, seq, running, room):
        assert isinstance(room, Room)
        return "token_budget" if len(running) >= 2 else super().obstacle(seq, running, room)

    def displace(self, waiting, running, room, now):
        oldest = next(iter(waiting), None)
        return running[:1] if oldest and running[0].has_progressed and now < 60 else []

    def on_displace(self, seq, now):
        super().on_displace(seq, now)
        self.heard.append(seq.id)

    def share(self, running, budget):
        return super().share(running, budget)
'''


@pytest.fixture
def old(tmp_path: Path) -> str:
    path = tmp_path / "old.py"
    path.write_text(OLD)
    return str(path)


def test_every_former_name_is_reported_with_its_file_and_the_new_name(old: str) -> None:
    with pytest.warns(RenamedWarning) as caught:
        policies.get_policy(old, 4)
    lines = [str(warning.message) for warning in caught]
    pairs = {
        "apart": "separate_prefill", "displaces": "preempts", "obstacle": "blocked_by", "displace": "preempt",
        "on_displace": "on_preempt", "share": "allocate_tokens", "conserving": "claims.conserving", "heeds": "claims.heeds",
        "patience": "claims.patience",
    }  # fmt: skip
    for name, new in pairs.items():
        assert any(line.startswith(f"{old}: {name} is now called {new}.") for line in lines), name
    assert any("Room is now called Budget" in line for line in lines)


@pytest.mark.parametrize("order", ["", "+sjf", "+vtc", "+mlfq"])
def test_hooks_by_former_names_decide_and_reach_the_next_class(old: str, order: str) -> None:
    with pytest.warns(RenamedWarning):
        policy = policies.get_policy(old + order, 4)
    run = drive(Scheduler(policy), requests((0, 3, 6), (0, 3, 6), (0, 3, 6), (5, 2, 3)))
    assert policy.heard  # on_displace
    assert sum(seq.preemptions for seq in run.sequences) == len(policy.heard)
    assert max(it.batch_size for it in run.iterations) == 2  # obstacle
    for plan, record in zip(run.plans, run.iterations):  # apart: no step has both prompts and decodes
        assert len({m.phase for m in record.members if m.phase != "idle"}) == 1, plan


def test_an_attribute_set_on_the_object_counts(old: str) -> None:
    with pytest.warns(RenamedWarning):
        policy = policies.get_policy(old, 1)
    assert (policy.preempts, policy.displaces, policy.apart) == (False, False, True)


def test_former_attributes_become_claims_and_the_last_one_set_counts(old: str) -> None:
    with pytest.warns(RenamedWarning):
        claims = policies.get_policy(old, 4).claims
    assert (claims.conserving, claims.heeds, claims.patience) == (False, ("priority",), 9.0)


def test_former_names_of_what_hooks_receive_work_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "counting.py"
    path.write_text(
        "from scheduling import policy\n\n\nclass Policy(policy.Policy):\n"
        "    def admit(self, waiting, running, room, now):\n"
        "        count = 0\n"
        "        for seq in waiting:\n"
        "            if len(running) + count == 2 or not room.holds(seq.total) or seq.displaced or seq.lost:\n"
        "                break\n"
        "            room, count = room.less(seq.total), count + 1\n"
        "        return count\n\n"
        "    def on_step(self, plan, now):\n"
        "        assert not plan.displaced and plan.sequences[0].has_moved_on is not None\n"
    )
    with pytest.warns(RenamedWarning) as caught:
        run = drive(Scheduler(policies.get_policy(str(path), 4)), requests((0, 3, 6), (0, 3, 6), (0, 3, 6)))
    assert max(it.batch_size for it in run.iterations) == 2
    assert {str(warning.message).split()[0] for warning in caught} == {
        "holds", "less", "displaced", "lost", "has_moved_on"
    }  # fmt: skip
    assert {Path(warning.filename) for warning in caught} == {path}


def test_a_former_attribute_may_be_set_before_the_base_class_is_initialized(tmp_path: Path) -> None:
    path = tmp_path / "eager.py"
    path.write_text(
        "from scheduling import policy\n\n\nclass Policy(policy.Policy):\n"
        "    def __init__(self, max_batch_size, **options):\n"
        "        self.patience = 5.0\n"
        "        super().__init__(max_batch_size, **options)\n"
    )
    with pytest.warns(RenamedWarning):
        policy = policies.get_policy(str(path), 4)
    assert (policy.claims.patience, policy.patience) == (5.0, 5.0)


@pytest.mark.parametrize(
    "declared",
    ['patience = option(5.0, "seconds", low=0.0)', "patience = property(lambda self: 5.0 + self.max_batch_size - 4)"],
)
def test_a_former_attribute_may_be_an_option_or_a_property(tmp_path: Path, declared: str) -> None:
    path = tmp_path / "patient.py"
    path.write_text(
        "from scheduling import policy\nfrom scheduling.options import option\n\n\n"
        f"class Policy(policy.Policy):\n    {declared}\n"
    )
    with pytest.warns(RenamedWarning):
        policy = policies.get_policy(str(path), 4)
    assert (policy.claims.patience, policy.patience) == (5.0, 5.0)


def test_no_shipped_policy_uses_a_former_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RenamedWarning)
        for name in [*policies.names(), *(f"dynamic+{order}" for order in policies.order_names())]:
            policies.get_policy(name, 4)


def test_a_check_reads_former_names(old: str, tmp_path: Path) -> None:
    path = tmp_path / "good.py"
    path.write_text(
        "from policies import static\n\n\nclass Policy(static.Policy):\n    holds = False\n\n"
        "    def release(self, running):\n        return [seq for seq in running if seq.is_finished]\n"
    )
    with pytest.warns(RenamedWarning):
        verdict = check(str(path), cases=50, large=0)
    assert verdict.broken is None, str(verdict)
    path.write_text(path.read_text().replace("False", "True"))
    with pytest.warns(RenamedWarning):
        assert policies.get_policy(str(path)).claims.holds


def test_the_command_reports_each_name_once(tmp_path: Path) -> None:
    path = tmp_path / "good.py"
    path.write_text("from scheduling import policy\n\n\nclass Policy(policy.Policy):\n    apart = True\n")
    with pytest.warns(RenamedWarning) as caught:
        assert main(["check", str(path), "--cases", "20", "--large-cases", "0"]) == 0
    assert len(caught) == 1
