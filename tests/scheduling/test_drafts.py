"""Several tokens in a step: what is committed, what a step may take for it, and how many drafts are worth computing."""

from __future__ import annotations

import pytest

from scheduling.draft_choice import DraftChoice
from scheduling.iteration import Drafted
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from scheduling.speculation import Acceptance, Offer, Speculator
from scheduling.step_law import StepLaw
from scheduling.stretches import Stretches
from simulate.laws.scripted_drafter import ScriptedDrafter
from tests.support.scheduling import add_all, burst, drive, make_scheduler, next_tokens, plan_of

NEVER_WRONG, ALWAYS_WRONG = 1 << 30, 1


def speculating(
    policy: str, slots: int, pages: PagePool | None = None, budget: int = 1 << 30, *, every: int, fixed: int | None
) -> Scheduler:
    """Return a scheduler whose sequences count their tokens, of which each `every`-th is proposed wrong."""
    made = make_scheduler(policy, slots, pages, budget)
    made.speculator = Speculator(ScriptedDrafter(lambda seq, place: place, every), fixed)
    return made


def test_right_drafts_save_steps_and_wrong_ones_do_not_cost_any() -> None:
    for every, steps in ((NEVER_WRONG, 1 + 3), (ALWAYS_WRONG, 12)):
        run = drive(speculating("dynamic", 2, every=every, fixed=3), burst((4, 12)))
        assert len(run.iterations) == steps
        assert run.sequences[0].accepted == 12 - steps


def test_the_record_tells_the_drafts_and_the_part_of_the_row_that_was_wrong() -> None:
    run = drive(speculating("dynamic", 2, every=ALWAYS_WRONG, fixed=3), burst((4, 12)))
    second = run.iterations[1]
    assert second.drafts == [Drafted("r0", 3, 0)]
    assert second.to_dict()["drafts"] == [{"id": "r0", "drafted": 3, "accepted": 0}]
    assert second.members[0].tokens == 4
    assert second.tokens == 1
    assert second.slot_steps == (0.25, 0, 0, 1, 0, 0.75)
    assert not run.iterations[0].drafts
    stretches = Stretches()
    for iteration in run.iterations:
        stretches.add(iteration)
    assert [stretch.steps for stretch in stretches.kept] == [1] * len(run.iterations)
    assert stretches.kept[1].to_dict()["drafts"] == second.to_dict()["drafts"]


def test_a_text_that_ends_in_the_middle_of_a_run_has_no_token_behind_its_end() -> None:
    sequences = burst((4, 12), (4, 12))
    sequences[0].stop = lambda token: "stop" if token == 3 else None
    told: list[int] = []
    made = speculating("dynamic", 2, every=NEVER_WRONG, fixed=5)
    made.hooks.on_token = lambda seq, now: told.append(seq.output_ids[-1]) if seq is sequences[0] else None
    add_all(made, sequences)
    clock = iter(range(100))
    steps = []
    while not made.is_idle:
        steps.append(made.step(next_tokens, lambda: next(clock)))
    assert sequences[0].output_ids == [0, 1, 2, 3]
    assert (sequences[0].drafted, sequences[0].accepted) == (5, 2)  # the first of three tokens needed no draft
    assert sum(step.tokens for step in steps if step) == 2 * 4 + sum(len(seq.output_ids) - 1 for seq in sequences)
    assert sequences[0].finish_reason == "stop"
    assert told == [0, 1, 2, 3]
    assert len(sequences[1].output_ids) == 12


def test_drafts_take_only_pages_that_are_free_and_give_back_those_of_wrong_ones() -> None:
    pool = PagePool(1 + 6, 2, prefix_cache=False)
    made = speculating("dynamic", 2, pool, every=ALWAYS_WRONG, fixed=8)
    made.policy.margin = 1
    sequences = burst((3, 9))
    sequences[0].open_ended = True
    made.add(sequences[0])
    made.step(lambda plan: [0], lambda: 0.0)  # the prompt
    plan = plan_of(made, 0.0)
    assert len(plan.drafts[0]) == 7  # to the end of the answer
    assert pool.free == 0
    made.commit(plan, next_tokens(plan), 0.0)
    assert len(sequences[0].pages) == 3  # five tokens so far, and one more
    taken = pool.take(), pool.take(), pool.take()
    plan = plan_of(made, 0.0)
    assert not plan.drafts
    assert taken


def test_the_token_budget_of_a_step_bounds_its_drafts() -> None:
    made = speculating("dynamic", 4, None, 6, every=NEVER_WRONG, fixed=8)
    add_all(made, burst((1, 20), (1, 20)))
    made.step(next_tokens, lambda: 0.0)
    plan = plan_of(made, 0.0)
    assert sum(plan.counts) == 6


def choice(chances: list[float], seconds: list[float], most: int = 8, round_seconds: float = 0.0) -> list[int]:
    """Return the best numbers of drafts where a step of n rows takes `seconds[n - rows]`."""
    rows = len(chances)
    of = [Sequence([1], 9) for _ in chances]
    return DraftChoice(of, [most] * rows, chances, rows, 99, lambda n: seconds[n - rows], round_seconds).best()


def test_drafts_are_computed_as_long_as_they_bring_more_tokens_per_second() -> None:
    free, dear = [1.0] * 99, [1.0 + n for n in range(99)]
    assert choice([0.9], free) == [8]
    assert choice([0.2], free) == [1]  # the second is right once in 25 times, which is not considered
    assert choice([0.9], dear) == [0]
    # 1.5 tokens in 1.2 s, 1.75 in 1.4 s, 1.875 in 1.6 s: the first two are as good, the third is not.
    assert choice([0.5], [1 + 0.2 * n for n in range(99)]) in ([1], [2])
    assert choice([0.9, 0.1], [1 + 0.3 * n for n in range(99)])[1] == 0
    assert choice([0.9], free, round_seconds=1.0) == [0]


def test_a_policy_may_choose_itself() -> None:
    class Own(Policy):
        def allocate_drafts(self, choice: DraftChoice) -> list[int]:
            return [1] * len(choice.sequences)

    made = Scheduler(Own(2), speculator=Speculator(ScriptedDrafter(lambda seq, place: place, NEVER_WRONG)))
    run = drive(made, burst((4, 11)))
    # After three steps without, the last two of which are measured.
    assert [drafted.drafted for it in run.iterations for drafted in it.drafts] == [1] * 3


class Slow(ScriptedDrafter):
    """Is always right, and takes so many seconds whenever it is asked."""

    def __init__(self, seconds: float) -> None:
        super().__init__(lambda seq, place: place, NEVER_WRONG)
        self.takes, self.asked, self.proposed = seconds, 0, 0

    def survey(self, sequences: list[Sequence]) -> list[Offer]:
        self.asked += 1
        return super().survey(sequences)

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        self.proposed += 1
        return super().propose(sequences, counts)

    def clock(self) -> float:
        return self.asked * self.takes


def asked(drafter: Slow, *batches: int) -> list[tuple[int, int]]:
    """Return how often a drafter is asked, and for drafts, in 1,000 steps of each of these batches, one after the other.

    A step takes a second and one more for each row: 8 drafts bring 80 % to one sequence alone, and 5 % to each of 16.
    """
    made = Scheduler(Policy(64), speculator=Speculator(drafter, clock=drafter.clock))
    counts, now = [], 0.0
    for batch in batches:
        sequences = burst(*[(1, 1 << 30)] * batch)
        add_all(made, sequences)
        before = drafter.asked, drafter.proposed
        for _ in range(1000):
            plan = plan_of(made, now)
            now += 1.0 + sum(plan.counts)
            made.commit(plan, next_tokens(plan), now)
        counts.append((drafter.asked - before[0], drafter.proposed - before[1]))
        made.remove_all(sequences, now)
    return counts


@pytest.mark.parametrize(("seconds", "times"), [(0.0, 1000), (0.17, 500), (1.7, 50), (17.0, 5)])
def test_a_drafter_that_is_asked_in_vain_rests_the_longer_the_longer_that_takes(seconds: float, times: int) -> None:
    ((often, drafted),) = asked(Slow(seconds), 16)
    assert often == pytest.approx(times, rel=0.05, abs=4)
    assert drafted <= 100  # to learn whether they are still not worth it


def test_a_drafter_that_rests_in_a_large_batch_is_asked_at_once_in_a_small_one() -> None:
    (many, _), (one, drafted), (again, _) = asked(Slow(1.7), 16, 1, 16)
    assert max(many, again) < 60
    assert one > 950
    assert drafted == one


def test_the_chance_of_a_draft_follows_what_was_seen_and_other_requests() -> None:
    acceptance = Acceptance()
    one, other = Sequence([1], 9), Sequence([1], 9)
    before = acceptance.chance(one, 0)
    for _ in range(20):
        acceptance.judge(one, 0, 4, 0)
    assert acceptance.chance(one, 0) < 0.1
    assert acceptance.chance(one, 0) <= acceptance.chance(other, 0) < before
    assert acceptance.chance(other, 1) == before
    for _ in range(20):
        acceptance.judge(other, 0, 4, 4)
    assert acceptance.chance(other, 0) > 0.9
    assert acceptance.least_recent([other, one]) == 1


def test_the_law_of_a_steps_time_follows_what_was_measured_and_never_goes_down() -> None:
    law = StepLaw()
    assert law.seconds(1, unknown=7.0) == 7.0
    for _ in range(40):
        for rows in (1, 3, 5, 9):
            law.learn(rows, 1.0 + 0.1 * rows + (0.3 if rows == 5 else 0.0))
    after = law.from_rows(1)
    assert [after(1), after(3), after(5)] == pytest.approx([1.1, 1.3, 1.8], rel=0.05)
    assert after(5) <= after(6) <= after(9) <= after(30)
    assert after(30) == pytest.approx(4.0, rel=0.1)
    law.learn(3, 99.0)  # the machine stood still
    law.learn(4, 99.0)
    assert law.from_rows(1)(4) < 3
    assert law.from_rows(3)(3) == pytest.approx(1.3, rel=0.05)
    for _ in range(200):
        law.learn(3, 2.6)  # and is slower from here on
    assert law.from_rows(3)(3) == pytest.approx(2.6, rel=0.1)
