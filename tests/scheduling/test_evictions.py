"""Which cached page goes first: each eviction on cases worked out by hand, and Belady's against an exhaustive search."""

from __future__ import annotations

import random
from dataclasses import fields
from functools import cache
from itertools import combinations

import pytest

import policies
from config import Config
from scheduling.eviction import Eviction
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.reservations import Reservations
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.laws.case import Case
from simulate.laws.cases import make_cases
from simulate.laws.trial import try_case

Prompt = tuple[int, ...]


def serve(pages: int, size: int, requests: list[Sequence], evict: Eviction | None) -> tuple[int, list[list[int]]]:
    """Serve requests one after the other; return the tokens found in the cache, and the pages that each one had."""
    pool = PagePool(pages + 1, size, evict=evict)
    held = Reservations(pool)
    for seq in requests:
        held.hash(seq)
    pool.evict.foresee(requests)
    taken = []
    for at, seq in enumerate(requests):
        taken.append(serve_one(held, seq, float(at)))
    return pool.hit_tokens, taken


def serve_one(held: Reservations, seq: Sequence, at: float) -> list[int]:
    assert held.reserve(seq, seq.total)
    pages = seq.pages
    seq.state, seq.computed, seq.last_token_at = "running", len(seq.prompt_ids), at
    seq.finish_reason, seq.output_ids = "length", [0] * seq.max_tokens
    held.release(seq)
    return pages


def sessions_of(prompts: list[Prompt], rng: random.Random) -> list[Sequence]:
    return [
        Sequence(list(p), 1, id=str(i), session=rng.choice(["", "a", "b"]), keep_s=rng.choice([0.0, 2.0, 5.0]))
        for i, p in enumerate(prompts)
    ]


def drawn(rng: random.Random, count: int, longest: int) -> list[Prompt]:
    return [tuple(rng.choices((0, 1), k=rng.randint(1, longest))) for _ in range(count)]


def most_hits(prompts: list[Prompt], pages: int, size: int) -> int:
    """Return the tokens that the best choice of evictions finds, by trying all."""

    @cache
    def best(at: int, cached: frozenset[Prompt]) -> int:
        if at == len(prompts):
            return 0
        prompt = prompts[at]
        heads = [prompt[:end] for end in range(size, len(prompt), size)]
        hits = next((i for i, head in enumerate(heads) if head not in cached), len(heads))
        others = cached - set(heads[:hits])
        room = pages - -(-(len(prompt) + 1) // size)
        full = {prompt[:end] for end in range(size, len(prompt) + 1, size)}
        kept = combinations(sorted(others), min(room, len(others)))
        return hits * size + max(best(at + 1, frozenset(full.union(some))) for some in kept)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(60))
def test_belady_finds_what_the_best_of_all_choices_finds(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([2, 3])
    prompts = [p if len(p) % size else (*p, 0) for p in drawn(rng, 7, 4 * size - 2)]  # none ends where a page ends
    pages = rng.choice([4, 5, 6])
    found, _ = serve(pages, size, sessions_of(prompts, rng), policies.get_eviction("belady"))
    assert found == most_hits(prompts, pages, size)


@pytest.mark.parametrize("seed", range(40))
def test_no_eviction_finds_more_than_belady(seed: int) -> None:
    rng = random.Random(seed)
    size, count = rng.choice([1, 2, 4]), 120
    prompts = drawn(rng, count, 6 * size)
    pages = rng.randint(7, 30)
    found = {
        name: serve(pages, size, sessions_of(prompts, random.Random(seed)), policies.get_eviction(name))[0]
        for name in policies.eviction_names(clairvoyant=True)
    }
    assert max(found.values()) == found["belady"]


@pytest.mark.parametrize("seed", range(20))
def test_pages_that_are_worth_the_same_go_as_without_a_ranking(seed: int) -> None:
    rng = random.Random(seed)
    size, pages = rng.choice([1, 3]), rng.randint(7, 20)
    prompts = drawn(rng, 150, 6 * size)
    plain = serve(pages, size, [Sequence(list(p), 1) for p in prompts], None)
    assert serve(pages, size, [Sequence(list(p), 1) for p in prompts], Eviction()) == plain
    assert serve(pages, size, [Sequence(list(p), 1) for p in prompts], policies.get_eviction("lru")) == plain
    assert serve(pages, size, [Sequence(list(p), 1) for p in prompts], policies.get_eviction("ttl")) == plain


@pytest.mark.parametrize("name", policies.eviction_names(clairvoyant=True))
def test_no_page_stays_that_is_cut_off_from_its_prefix(name: str) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        pages = rng.randint(7, 12)
        requests = sessions_of(drawn(rng, 80, 6), rng)
        held = Reservations(pool := PagePool(pages + 1, 1, evict=policies.get_eviction(name)))
        for seq in requests:
            held.hash(seq)
        pool.evict.foresee(requests)
        for at, seq in enumerate(requests):
            serve_one(held, seq, float(at))
            found = {key for s in requests for key in s.hashes[: pool.cached_tokens(s.hashes)]}
            assert (pool.used, pool.cached) == (0, len(found))


@pytest.mark.parametrize("name", policies.eviction_names(clairvoyant=True))
def test_every_law_holds_with_every_eviction(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Case.sequences
    made: list[Sequence] = []

    def with_sessions(case: Case, backwards: bool = False) -> list[Sequence]:
        made[:] = plain(case, backwards)
        for seq in made:
            seq.session, seq.keep_s = seq.client, 30.0 * seq.priority
        return list(made)

    def evicting(policy: Policy, pool: PagePool, budget: int) -> Scheduler:
        evict = policies.get_eviction(name)
        scheduler = Scheduler(policy, PagePool(pool.total + 1, pool.page_size, salt="check", evict=evict), budget)
        for seq in made:
            scheduler.batch.pages.hash(seq)
        evict.foresee(made)
        return scheduler

    monkeypatch.setattr(Case, "sequences", with_sessions)
    cases = [case for case in make_cases(160, 5) if case.pages and case.prefix_cache]
    preempted = 0
    for case in cases:
        trial = try_case(lambda slots: policies.get_policy("chunked", slots), case, evicting, twice=False)
        preempted += sum(seq.preemptions for seq in trial.sequences)
    assert preempted > 0


def found_by(name: str, *asked: tuple[int, str, float]) -> int:
    """Serve prompts of three tokens, a page each with one to spare; return the tokens found, with four pages."""
    requests = [Sequence([first, first, first], 1, session=session, keep_s=keep) for first, session, keep in asked]
    return serve(8, 1, requests, policies.get_eviction(name))[0]


def test_ttl_keeps_what_its_client_comes_back_to_and_no_longer() -> None:
    kept = [(1, "", 9.0), (2, "", 0.0), (3, "", 0.0), (4, "", 0.0), (1, "", 0.0)]
    assert found_by("lru", *kept) == 0
    assert found_by("ttl", *kept) == 2
    over = [(1, "", 0.5), (2, "", 0.0), (3, "", 0.0), (4, "", 0.0), (1, "", 0.0)]
    assert found_by("ttl", *over) == 0


def test_the_session_with_the_fewest_turns_to_come_goes_first() -> None:
    # The first two sessions teach that a first turn is followed by another one, and a second turn by none.
    lesson = [(1, "a", 0.0), (1, "a", 0.0), (2, "b", 0.0), (2, "b", 0.0)]
    first_turn, strangers = (3, "c", 0.0), [(n, "", 0.0) for n in (5, 6, 7)]
    assert found_by("least-remaining-turns", *lesson, first_turn, *strangers, first_turn) == 2 + 2 + 2
    assert found_by("lru", *lesson, first_turn, *strangers, first_turn) == 2 + 2


def test_a_session_that_never_comes_back_makes_room_in_the_end() -> None:
    evict = policies.get_eviction("least-remaining-turns")
    lesson = [Sequence([n, n, n], 1, session=s) for n, s in ((1, "a"), (1, "a"), (2, "b"), (2, "b"), (3, "gone"))]
    others = [Sequence([n % 2 + 8] * 3, 1, session=f"{n}") for n in range(40)]
    again = Sequence([3, 3, 3], 1, session="late")
    serve(8, 1, [*lesson, *others, *[Sequence([n + 20] * 3, 1, session=f"x{n}") for n in range(9)], again], evict)
    assert again.cached == 0


def test_the_server_offers_every_eviction_that_needs_no_future() -> None:
    (item,) = (item for item in fields(Config) if item.name == "evict")
    assert sorted(item.metadata["type"].known) == policies.eviction_names()
