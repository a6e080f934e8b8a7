"""Adapters by name: what is in memory, what leaves it, and what a request holds."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from serving.adapters import AdapterError, AdapterStore


@dataclass(eq=False)
class Weights:
    """An adapter that has only a size."""

    digest: str
    nbytes: int = 10
    rank: int = 8


class Disk:
    """Reads adapters: a source is a number of bytes, or words that cannot be read."""

    def __init__(self) -> None:
        self.reads: list[str] = []

    def read(self, source: str) -> Weights:
        self.reads.append(source)
        name, _, size = source.partition(":")
        if not size:
            raise ValueError(f"{source} is no adapter")
        return Weights(name, int(size))


def store_of(limit: int = 30, **sizes: int) -> tuple[AdapterStore, Disk]:
    disk = Disk()
    store = AdapterStore(disk.read, limit, reserved={"base"})
    for name, size in sizes.items():
        store.add(name, f"{name}:{size}")
    return store, disk


@contextmanager
def refusal(problem: str, says: str | None = None) -> Iterator[None]:
    """Expect that the store refuses for this reason."""
    with pytest.raises(AdapterError, match=says) as caught:
        yield
    assert caught.value.problem == problem


def here(store: AdapterStore) -> list[str]:
    return [entry.name for entry in store.entries() if entry.loaded is not None]


def test_the_least_recently_used_adapter_leaves_and_comes_back_when_it_is_asked_for() -> None:
    store, disk = store_of(30, a=10, b=10, c=10)
    store.acquire("a")
    store.add("d", "d:10")
    assert here(store) == ["a", "c", "d"]
    assert store.acquire("b").weights.digest == "b"
    assert here(store) == ["a", "b", "d"]
    assert disk.reads == ["a:10", "b:10", "c:10", "d:10", "b:10"]
    assert (store.loads, store.evictions, store.nbytes) == (5, 2, 30)


def test_an_adapter_that_a_request_has_does_not_leave() -> None:
    store, _ = store_of(30, a=10, b=10, c=10)
    held = store.acquire("a")
    store.in_use = lambda: [held.weights, None]
    store.acquire("b")
    store.acquire("c")
    store.add("d", "d:20")
    assert here(store) == ["a", "d"]
    with refusal("full", "--adapter-memory"):
        store.add("e", "e:21")


def test_what_only_a_request_holds_counts_until_the_request_ends() -> None:
    store, _ = store_of(30, a=20)
    held = [store.acquire("a")]
    store.remove("a")
    with pytest.raises(AdapterError):
        store.acquire("a")
    with pytest.raises(AdapterError):
        store.add("b", "b:20")
    assert store.nbytes == 20
    held.clear()
    gc.collect()
    store.add("b", "b:20")
    assert store.nbytes == 20


def test_a_replaced_adapter_serves_the_requests_that_have_it() -> None:
    store, _ = store_of(40, a=10)
    before = store.acquire("a")
    with refusal("exists"):
        store.add("a", "other:10")
    store.add("a", "other:10", replace=True)
    after = store.acquire("a")
    assert (before.weights.digest, after.weights.digest) == ("a", "other")
    assert before.salt != after.salt


@pytest.mark.parametrize("name", ["", "base", "a b", "x" * 129, "-a", "a=b", "a,b", "ä"])
def test_a_name_must_be_plain_and_not_the_models(name: str) -> None:
    with refusal("broken"):
        store_of()[0].add(name, "a:1")


def test_what_cannot_be_read_is_not_known_and_the_others_stay() -> None:
    store, _ = store_of(30, a=10)
    with pytest.raises(AdapterError) as caught:
        store.add("b", "nonsense")
    assert "nonsense is no adapter" in str(caught.value)
    assert [entry.name for entry in store.entries()] == ["a"]
    with refusal("unknown"):
        store.remove("b")


def test_an_adapter_larger_than_the_limit_is_refused() -> None:
    with refusal("full"):
        store_of(30)[0].add("a", "a:31")


def test_many_requests_read_an_absent_adapter_once() -> None:
    store, disk = store_of(10, a=10, b=10)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(store.acquire, ["a"] * 8))
    assert disk.reads == ["a:10", "b:10", "a:10"]
