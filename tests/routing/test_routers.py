"""The routers keep their laws, prefer what they say, and the laws notice routers that do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from random import Random

import pytest
from router_laws import broken_law

from routing import routers
from routing.routers import ROUTERS, Replicas, Router, RoutingKey

CASES = 20
BOUNDED = {"least-loaded", "prefix-aware", "session-sticky"}  # whose first choice has at most `Replicas.most`


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_keeps_every_law(name: str) -> None:
    assert [broken_law(ROUTERS[name], seed, bounded=name in BOUNDED) for seed in range(CASES)] == [None] * CASES


def always(choose: Callable[[Replicas], list[int]]) -> Callable[[Random], Router]:
    return lambda rng: lambda replicas, key: iter(choose(replicas))


def by_name(rng: Random) -> Router:
    """Remember replicas by their index, which another may have later."""
    home: dict[str, int] = {}

    def route(replicas: Replicas, key: RoutingKey) -> Iterator[int]:
        first = home.setdefault(key.session, rng.randrange(len(replicas.names)))
        return itertools.chain([first], (i for i in range(len(replicas.names)) if i != first))

    return route


def drains(replicas: Replicas) -> list[int]:
    replicas.load[0] = 0  # type: ignore[index]
    return list(range(len(replicas.names)))


FAULTY: dict[str, tuple[Callable[[Random], Router], str]] = {
    "the first only": (always(lambda replicas: [0]), "each replica once"),
    "the first always": (always(lambda replicas: list(range(len(replicas.names)))), "no replica starves"),
    "the fullest": (always(lambda r: sorted(range(len(r.names)), key=lambda i: -r.load[i])), "bounded imbalance"),
    "one that left": (by_name, "each replica once"),
    "changes the loads": (always(drains), "purity"),
    "draws lots of its own": (
        lambda rng: lambda replicas, key: iter(Random().sample(range(len(replicas.names)), len(replicas.names))),
        "repeatable",
    ),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_planted_fault_is_caught(name: str) -> None:
    make, law = FAULTY[name]
    found = {broken_law(make, seed, bounded=law == "bounded imbalance") for seed in range(CASES)} - {None}
    assert any(str(broken).startswith(law) for broken in found)


def chosen(router: Router, replicas: Replicas, *keys: RoutingKey) -> list[int]:
    return [next(router(replicas, one)) for one in keys]


def fleet_of(*load: int, **columns: list[float]) -> Replicas:
    return Replicas([f"r{i}" for i in range(len(load))], load, **columns)  # type: ignore[arg-type]


def test_each_in_turn() -> None:
    assert chosen(routers.round_robin(Random(1)), fleet_of(9, 0, 0), *[RoutingKey()] * 4) == [0, 1, 2, 0]


def test_the_fewest_requests_then_the_fewest_prompt_tokens() -> None:
    replicas = Replicas(["a", "b", "c"], [2, 1, 1], prefill_tokens=[0, 50, 10])
    assert list(routers.least_loaded(Random(1))(replicas, RoutingKey())) == [2, 1, 0]


def test_of_two_with_the_same_load_the_one_with_more_free_pages() -> None:
    replicas = Replicas(["a", "b"], [3, 3], kv_free=[0.1, 0.9])
    assert chosen(routers.power_of_two(Random(1)), replicas, *[RoutingKey()] * 5) == [1] * 5


def test_the_longest_known_beginning_decides() -> None:
    router = routers.prefix_aware(Random(3))
    short, long = RoutingKey([1, 2]), RoutingKey([1, 2, 3, 4])
    (first,) = chosen(router, fleet_of(*[0] * 8), short)
    assert chosen(router, fleet_of(*[1] * 8), long, RoutingKey([1, 2, 3, 9]), short) == [first] * 3


def test_a_beginning_is_forgotten_with_its_replica() -> None:
    router = routers.prefix_aware(Random(3))
    chosen(router, fleet_of(0), RoutingKey([1, 2]))
    assert chosen(router, Replicas(["new", "newer"], [5, 0]), RoutingKey([1, 2])) == [1]


@pytest.mark.parametrize(
    ("name", "key"), [("prefix-aware", RoutingKey([1])), ("session-sticky", RoutingKey(session="s"))]
)
def test_a_preferred_replica_gives_way_when_it_is_loaded_beyond_the_bound(name: str, key: RoutingKey) -> None:
    router = ROUTERS[name](Random(2))
    (home,) = chosen(router, fleet_of(0, 0, 0), key)
    full = [1, 1, 1]
    full[home] = 30
    assert chosen(router, fleet_of(*full), key) != [home]


def test_a_session_stays_and_a_replica_that_leaves_moves_only_its_own() -> None:
    sessions = [RoutingKey(session=f"s{k}") for k in range(60)]
    before = chosen(routers.session_sticky(Random(1)), fleet_of(*[0] * 4), *sessions)
    others = chosen(routers.session_sticky(Random(9)), fleet_of(*[0] * 4), *sessions)
    assert before == others
    fewer = Replicas(["r0", "r1", "r2"], [0] * 3)
    after = chosen(routers.session_sticky(Random(5)), fewer, *sessions)
    assert all(a == b for a, b in zip(before, after) if a < 3)


def test_what_a_router_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "ENTRIES", 4)
    router = routers.prefix_aware(Random(3))
    (first,) = chosen(router, fleet_of(*[0] * 50), RoutingKey([1]))
    chosen(router, fleet_of(*[0] * 50), *(RoutingKey([k]) for k in range(10, 14)))
    assert chosen(router, fleet_of(*[0] * 50), RoutingKey([1])) != [first]
