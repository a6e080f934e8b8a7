"""The page pool against a model too simple to be wrong, and its promises one by one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduling.pages import PagePool

Prefix = tuple[int, ...]
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@dataclass
class Lease:
    """Pages that were reserved for a prompt and not yet given back."""

    prompt: list[int]
    pages: list[int]
    cached: int
    hashes: list[bytes]


class PoolAgainstModel(RuleBasedStateMachine):
    """`content` is what each page is known to hold, `freed` when it was last given back."""

    @initialize(pages=st.integers(2, 14), size=st.integers(1, 4))
    def start(self, pages: int, size: int) -> None:
        self.pool, self.size, self.total = PagePool(pages, size), size, pages - 1
        self.leases: list[Lease] = []
        self.content: dict[int, Prefix] = {}
        self.freed: dict[int, int] = {}
        self.time = 0
        self.asked = self.hit = 0

    def owners(self, page: int) -> int:
        return sum(page in lease.pages for lease in self.leases)

    def prefixes(self, prompt: list[int]) -> list[Prefix]:
        """Return the content of each full page that leaves one token at least to compute."""
        ends = range(self.size, len(prompt), self.size)
        return [tuple(prompt[:end]) for end in ends]

    @rule(prompt=prompts, answer=st.integers(1, 6))
    def reserve(self, prompt: list[int], answer: int) -> None:
        known = {prefix: page for page, prefix in self.content.items()}
        hits: list[int] = []
        for prefix in self.prefixes(prompt):
            if prefix not in known:
                break
            hits.append(known[prefix])
        free = [p for p in range(1, self.total + 1) if not self.owners(p)]
        fresh = -(-(len(prompt) + answer) // self.size) - len(hits)
        room = fresh <= len([p for p in free if p not in hits])
        hashes = self.pool.hashes(prompt)
        found = self.pool.reserve(hashes, len(prompt) + answer, len(prompt))
        assert (found is not None) == room
        if found is None:
            return
        pages, cached = found
        assert cached == len(hits) * self.size < len(prompt)
        assert pages[: len(hits)] == hits
        taken = pages[len(hits) :]
        assert len(set(taken)) == fresh
        assert set(taken) <= set(free) - set(hits)
        self.check_that_the_least_valuable_were_taken(taken, set(free) - set(hits) - set(taken))
        for page in taken:
            self.content.pop(page, None)
        self.leases.append(Lease(prompt, pages, cached, hashes))
        self.asked += len(prompt)
        self.hit += cached

    def check_that_the_least_valuable_were_taken(self, taken: list[int], spared: set[int]) -> None:
        evicted = [page for page in taken if page in self.content]
        if evicted:
            assert all(page in self.content for page in spared), "an empty page was spared"
            last = max(self.freed[page] for page in evicted)
            assert all(self.freed[page] > last for page in spared), "not the least recently used"

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.pool.publish(lease.pages, lease.hashes)
        for page, prefix in zip(lease.pages, self.prefixes(lease.prompt)):
            if prefix not in self.content.values():
                self.content[page] = prefix

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases = [other for other in self.leases if other is not lease]
        self.pool.release(lease.pages)
        for page in reversed(lease.pages):  # a tail is older than its prefix
            self.time += 1
            if not self.owners(page):
                self.freed[page] = self.time

    @invariant()
    def counts_are_exact(self) -> None:
        used = {page for lease in self.leases for page in lease.pages}
        assert 0 not in used
        assert (self.pool.used, self.pool.free) == (len(used), self.total - len(used))
        assert self.pool.cached == len([page for page in self.content if page not in used])
        assert (self.pool.query_tokens, self.pool.hit_tokens) == (self.asked, self.hit)

    @invariant()
    def only_what_the_cache_knows_has_two_owners(self) -> None:
        for i, lease in enumerate(self.leases):
            assert len(set(lease.pages)) == len(lease.pages)
            for other in self.leases[:i]:
                for page in set(lease.pages) & set(other.pages):
                    place = lease.pages.index(page)
                    assert place < max(lease.cached, other.cached) // self.size
                    end = (place + 1) * self.size
                    assert lease.prompt[:end] == other.prompt[:end]

    def teardown(self) -> None:
        for lease in getattr(self, "leases", []):
            self.pool.release(lease.pages)
        if hasattr(self, "pool"):
            assert (self.pool.free, self.pool.used) == (self.total, 0)


class TestPoolAgainstModel(PoolAgainstModel.TestCase):
    settings = settings(stateful_step_count=40)


def fill(pool: PagePool, prompt: list[int], answer: int = 1) -> list[int]:
    """Reserve, publish and give back; return the pages."""
    hashes = pool.hashes(prompt)
    found = pool.reserve(hashes, len(prompt) + answer, len(prompt))
    assert found is not None
    pool.publish(found[0], hashes)
    pool.release(found[0])
    return found[0]


def test_without_a_prefix_cache_nothing_is_ever_found() -> None:
    pool = PagePool(20, 2, prefix_cache=False)
    fill(pool, [1, 2, 3, 4, 5])
    assert pool.hashes([1, 2, 3, 4, 5]) == []
    assert (pool.cached, pool.query_tokens, pool.hit_tokens) == (0, 0, 0)


def test_the_salt_separates_models() -> None:
    one, other = PagePool(20, 2, salt="gpt2 float32"), PagePool(20, 2, salt="gpt2 bfloat16")
    assert not set(one.hashes([1, 2, 3, 4, 5])) & set(other.hashes([1, 2, 3, 4, 5]))
    assert one.hashes([1, 2, 3]) == PagePool(9, 2, salt="gpt2 float32").hashes([1, 2, 9])


def test_pages_given_back_twice_are_caught() -> None:
    pool = PagePool(9, 2)
    found = pool.reserve([], 4)
    assert found is not None
    pool.release(found[0])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(found[0])


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (1024, 64)])
def test_pages_are_rounded_up(tokens: int, pages: int) -> None:
    pool = PagePool(64, 16)
    assert pool.pages_for(tokens) == pages
    assert pool.can_ever_hold(tokens) == (pages <= 63)


def test_a_pool_without_a_page_to_give_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1 pages.*--kv-memory"):
        PagePool(1, 16)


COMMON, OTHER = [1] * 8 + [2], [1] * 4 + [3] * 5


def test_the_most_common_pages_are_pinned_and_no_other_is_cached() -> None:
    pool = PagePool(11, 4)
    computed = pool.pin([OTHER, COMMON, COMMON, [9] * 9], 2, 9)
    assert [(seq.prompt_ids[:-1], len(seq.pages), seq.computed) for seq in computed] == [
        ([1] * 4, 1, 0),
        ([1] * 8, 2, 4),
    ]
    assert computed[1].pages[0] == computed[0].pages[0]
    assert (pool.total, pool.used, pool.cached) == (8, 0, 0)
    for prompt, found in ((COMMON, 8), (OTHER, 4), ([9] * 9, 0)):
        for _ in range(2):  # what a request computes is not found by the next
            assert pool.cached_tokens(pool.hashes(prompt)) == found
            fill(pool, prompt)
    assert (pool.free, pool.used) == (8, 0)


def test_pinned_pages_outlast_a_pool_that_was_full() -> None:
    pool = PagePool(11, 4)
    pool.pin([COMMON], 2, 9)
    pages = [pool.take() for _ in range(pool.free)]
    assert not pool.can_ever_hold(9 * 4)
    assert set(pages).isdisjoint(pool.shareable(pool.hashes(COMMON), 8) or ())
    pool.release(pages)
    assert pool.cached_tokens(pool.hashes(COMMON)) == 8


def test_pinning_leaves_room_for_the_longest_request() -> None:
    prompts = [[n] * 9 for n in range(20)]
    with pytest.raises(ValueError, match=r"is 8, but .* 9 tokens leaves 7 of 10. Use 7 or fewer"):
        PagePool(11, 4).pin(prompts, 8, 9)
    assert len(PagePool(11, 4).pin(prompts, 7, 9)) == 7
