"""Requests that join with pages for their prompts, grow, lose their pages to others, and are computed again."""

from __future__ import annotations

import pytest

import policies
from costs.cost import Cost
from costs.steps import Step
from scheduling.pages import PagePool
from scheduling.policy import Policy, PolicyError
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.simulator import Run, simulate
from tests.support.scheduling import drive, make_scheduler, next_tokens, requests


def open_ended(*trace: tuple[int, int | list[int], int]) -> list[Sequence]:
    sequences = requests(*trace)
    for seq in sequences:
        seq.open_ended = True
    return sequences


def growing(policy: str, slots: int, pool: PagePool | None, margin: int = 1, budget: int = 1 << 30) -> Scheduler:
    made = make_scheduler(policy, slots, pool, budget)
    made.policy.margin = margin
    return made


@pytest.mark.parametrize(("is_open_ended", "running"), [(False, 21), (True, 64)])
def test_64_chats_without_max_tokens_run_at_once_in_2_gib_of_gpt2_medium(is_open_ended: bool, running: int) -> None:
    pages = (2 << 30) // (96 * 1024 * 64) + 1
    made = make_scheduler("dynamic", 64, PagePool(pages, 64))
    sequences = [Sequence([i] * 40, 1024 - 40, id=str(i), open_ended=is_open_ended) for i in range(64)]
    for seq in sequences:
        seq.stop = lambda token: "stop" if token == 200 else None
        made.add(seq)
    made.step(next_tokens, lambda: 0.0)
    assert len(made.running) == running
    while not made.is_idle:
        made.step(next_tokens, lambda: 0.0)
    assert {len(seq.output_ids) for seq in sequences} == {201}
    assert sum(seq.preemptions for seq in sequences) == 0


def test_the_last_to_join_is_preempted_and_recomputes_less_than_a_page() -> None:
    pool = PagePool(9, 4)  # eight pages
    first, second = open_ended((0, 8, 12), (1, [*range(50, 58)], 12))
    run = drive(growing("dynamic", 2, pool), [first, second])
    assert (first.preemptions, second.preemptions) == (0, 1)
    # The pages of 12 and 16 tokens: both have four pages when the first needs its fifth.
    again = next(it for it in run.iterations if "r1" in it.joined and it.n > 2)
    assert first.finished_at is not None
    assert again.t >= first.finished_at
    member = next(m for m in again.members if m.id == "r1")
    assert (member.phase, member.tokens) == ("prefill", member.computed % 4 or 4)
    assert (pool.query_tokens, pool.hit_tokens) == (16, 0)


def test_the_policy_names_the_victim() -> None:
    class First(Policy):
        def victim(self, running: list[Sequence], now: float) -> Sequence:
            return running[0]

    made = Scheduler(First(2), PagePool(9, 4))
    made.policy.margin = 1
    run = drive(made, open_ended((0, 8, 12), (1, [*range(50, 58)], 12)))
    assert [seq.preemptions for seq in run.sequences] == [1, 0]


def test_a_victim_that_does_not_run_is_an_error_of_the_policy() -> None:
    stranger = Sequence([1], 1, id="stranger")
    mine = type("Mine", (Policy,), {"victim": lambda self, running, now: stranger})(2)
    mine.margin = 1
    with pytest.raises(PolicyError, match="victim: stranger"):
        drive(Scheduler(mine, PagePool(9, 4)), open_ended((0, 8, 12), (1, 8, 12)))


def test_rows_that_a_static_batch_holds_give_up_their_pages_to_the_last_that_grows() -> None:
    """Growing requests meet a static policy only after a live switch, since it reserves whole answers itself."""
    made = growing("dynamic", 2, PagePool(9, 4))
    run = drive(
        made, open_ended((0, [*range(50, 62)], 3), (0, 8, 20)), switch={1: policies.get_policy("static", 2)}
    )  # fmt: skip
    held = [it.pages_used for it in run.iterations if any(m.phase == "held" for m in it.members)]
    assert (held[0], held[-2]) == (7, 7)  # seven of the last that runs, before the end of the batch
    assert max(held) == 8
    assert [seq.preemptions for seq in run.sequences] == [0, 0]


def test_the_next_turn_of_a_chat_finds_the_answer_of_the_last() -> None:
    pool = PagePool(40, 4)
    made = make_scheduler("dynamic", 2, pool)
    (turn,) = requests((0, 6, 9))
    drive(made, [turn])
    hits = pool.hit_tokens
    again = Sequence([*turn.prompt_ids, *turn.output_ids, 7, 7], 3, id="next")
    drive(made, [again])
    # Of 15 tokens, all but the last were computed: three full pages.
    assert (again.cached, pool.hit_tokens - hits) == (12, 12)


@pytest.mark.parametrize("reserve", ["all", "prompt"])
def test_what_is_reserved_depends_on_the_option_and_on_the_request(reserve: str) -> None:
    policy = policies.get_policy("dynamic", 2, {"reserve": reserve})
    named, unnamed = Sequence([1] * 10, 500), Sequence([1] * 10, 500, open_ended=True)
    expected = {"all": 510, "prompt": 74}[reserve]
    assert (policy.reserve_tokens(named), policy.reserve_tokens(unnamed)) == (expected, 74)
    assert policies.get_policy("static", 2).reserve_tokens(unnamed) == 510


class Flat(Cost):
    def seconds(self, step: Step) -> float:
        return 1.0 + step.tokens / 64


@pytest.mark.parametrize("policy", ["dynamic", "chunked", "prefill-first", "adaptive"])
@pytest.mark.parametrize("pages", [60, 200, 1000])
def test_a_leap_over_steps_in_which_pages_grow_changes_nothing(policy: str, pages: int) -> None:
    def run(fast: bool) -> Run:
        sequences = [
            Sequence([0] * (5 + i % 7), 30 + 37 * i % 170, id=str(i), arrived_at=40.0 * (i // 3), open_ended=True)
            for i in range(40)
        ]
        made = growing(policy, 8, PagePool(pages, 4, prefix_cache=False), 2)
        return simulate(made, sequences, Flat(), fast_forward=fast)

    leaping, walking = run(True), run(False)
    assert [(s.finished_at, s.preemptions, s.batch_sum) for s in leaping.sequences] == [
        (s.finished_at, s.preemptions, s.batch_sum) for s in walking.sequences
    ]
    assert (leaping.steps, leaping.gaps) == (walking.steps, walking.gaps)
    if policy != "adaptive":
        assert any(s.preemptions for s in walking.sequences) == (pages < 200)
