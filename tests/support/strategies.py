"""Random traces, pools and faults for tests of properties of the scheduler and of policies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hypothesis import strategies as st

from scheduling.pages import PagePool
from tests.support.scheduling import Request

Pool = Callable[[], PagePool | None]
Faults = dict[int, list[int]]
slots = st.integers(1, 5)
budgets = st.integers(1, 12)
# The places of sequences in the batch, by step: whose rows fail, or who is cancelled.
faults = st.dictionaries(st.integers(0, 25), st.lists(st.integers(0, 9), max_size=3), max_size=8)


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    """Draw up to 12 small requests in order of arrival, prompts of two words so that prefixes recur."""
    now, trace = 0, []
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12)
    for gap, prompt, output in draw(
        st.lists(st.tuples(st.integers(0, 40), prompts, st.integers(1, 8)), min_size=1, max_size=12)
    ):
        now += gap
        trace.append((now, prompt, output))
    return trace


@st.composite
def tight_pools(draw: st.DrawFn, most: int = 2) -> Pool:
    """Draw what makes a pool in which the largest request of `traces` just fits, or `most` such requests."""
    size = draw(st.integers(1, 5))
    least = -(-20 // size) + 1
    pages = draw(st.integers(least, most * least))
    return partial(PagePool, pages, size, prefix_cache=draw(st.booleans()), salt="test")


def pools() -> st.SearchStrategy[Pool]:
    """Draw what makes a pool in which each request of `traces` fits alone, or what makes none."""
    return st.just(lambda: None) | tight_pools(3)
