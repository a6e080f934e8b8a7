"""Which replica gets a request: the routers, as functions of what is known of each replica.

The same functions choose in `simulate fleet` and in front of real servers. A router is made once, with the random
generator that it may use, and remembers what it needs. It must not know clocks, networks, or how old its facts are.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import NamedTuple, TypeVar

K = TypeVar("K")

ENTRIES = 100_000  # blocks of prompts, or sessions, that a router remembers
SLACK, SPARE = 2.0, 4  # a preferred replica may have SLACK times the mean load and SPARE requests more


@dataclass
class Replicas:
    """The replicas that can take a request, as columns: item i of each belongs to replica i.

    Routers only read. Columns that change often may be lazy sequences, since most routers look at a few items.
    """

    names: Sequence[str]  # lasting ones: a replica that comes back is a new one
    load: Sequence[int]  # requests, running and waiting
    kv_free: Sequence[float] = ()  # the share of KV pages that are free; empty where unknown
    prefill_tokens: Sequence[int] = ()  # prompt tokens that are not computed yet; empty where unknown
    index: dict[str, int] = field(init=False, repr=False)  # of each name

    def __post_init__(self) -> None:
        self.index = {name: i for i, name in enumerate(self.names)}

    @property
    def most(self) -> float:
        """The load up to which a replica may be preferred for what it remembers."""
        return SLACK * sum(self.load) / len(self.load) + SPARE


class RoutingKey(NamedTuple):
    """What a router knows about a request: its session, and a chained hash of each full block of its prompt."""

    blocks: Sequence[Hashable] = ()
    session: str = ""


# Yields the replicas' indices, the best first and each once: the caller takes the next where one refuses.
Router = Callable[[Replicas, RoutingKey], Iterator[int]]


def round_robin(rng: Random) -> Router:
    """Each replica in turn, whatever its load."""
    turns = itertools.count()

    def route(replicas: Replicas, key: RoutingKey) -> Iterator[int]:
        return _around(next(turns), len(replicas.names))

    return route


def random(rng: Random) -> Router:
    """A random replica, as many independent front ends choose."""
    return lambda replicas, key: _around(rng.randrange(len(replicas.names)), len(replicas.names))


def least_loaded(rng: Random) -> Router:
    """The replica with the fewest requests; ties go to the one with the fewest prompt tokens to compute, then at random."""

    def route(replicas: Replicas, key: RoutingKey) -> Iterator[int]:
        load, count = replicas.load, len(replicas.names)
        least = min(load)
        start = rng.randrange(count)
        first = [i for i in _around(start, count) if load[i] == least]
        if replicas.prefill_tokens and len(first) > 1:
            first.sort(key=lambda i: replicas.prefill_tokens[i])
        yield from first
        yield from sorted((i for i in _around(start, count) if load[i] != least), key=lambda i: load[i])

    return route


def power_of_two(rng: Random) -> Router:
    """The less loaded of two random replicas (Mitzenmacher 2001); ties go to the one with more free KV pages."""

    def route(replicas: Replicas, key: RoutingKey) -> Iterator[int]:
        count, load, free = len(replicas.names), replicas.load, replicas.kv_free
        start = a = rng.randrange(count)
        b = rng.randrange(count - 1) if count > 1 else a
        b += count > 1 and b >= a  # another one than the first
        if load[b] < load[a] or (load[b] == load[a] and free and free[b] > free[a]):
            a, b = b, a
        yield a
        if b != a:
            yield b
        yield from (i for i in _around(start, count) if i not in (a, b))

    return route


def prefix_aware(rng: Random) -> Router:
    """The replica that last got the longest part of the prompt; for a new prompt, the choice of `power_of_two`.

    A load above `Replicas.most` gives way to the least one. The router keeps its own map from blocks to replicas, which
    the least recently used leave first, so it asks no replica what it has cached.
    """
    home: OrderedDict[Hashable, str] = OrderedDict()
    fallback = power_of_two(rng)

    def route(replicas: Replicas, key: RoutingKey) -> Iterator[int]:
        known = (home[block] for block in reversed(key.blocks) if block in home)
        order = _bounded(_first_there(replicas, known), replicas, fallback(replicas, key))
        return _remembering(home, key.blocks, replicas, order)

    return route


def session_sticky(rng: Random) -> Router:
    """The replica that the session had before; a new session goes by its hash, and without one: `power_of_two`.

    The hash is highest for one of the replicas (Thaler and Ravishankar 1998), so several routers agree, and a replica
    that leaves moves only its own sessions. A load above `Replicas.most` gives way to the least one.
    """
    home: OrderedDict[str, str] = OrderedDict()
    fallback = power_of_two(rng)

    def route(replicas: Replicas, key: RoutingKey) -> Iterator[int]:
        if not key.session:
            return _bounded(None, replicas, fallback(replicas, key))
        known = [home[key.session]] if key.session in home else []
        preferred = _first_there(replicas, known)
        if preferred is None:
            preferred = max(range(len(replicas.names)), key=lambda i: _weight(key.session, replicas.names[i]))
        return _remembering(home, [key.session], replicas, _bounded(preferred, replicas, fallback(replicas, key)))

    return route


ROUTERS: dict[str, Callable[[Random], Router]] = {
    "round-robin": round_robin, "random": random, "least-loaded": least_loaded, "power-of-two": power_of_two,
    "prefix-aware": prefix_aware, "session-sticky": session_sticky,
}  # fmt: skip


def _around(start: int, count: int) -> Iterator[int]:
    """Yield all indices, beginning at `start`."""
    return (i % count for i in range(start % count, start % count + count))


def _first_there(replicas: Replicas, names: Iterable[str]) -> int | None:
    """Return the index of the first of these replicas that is there."""
    return next((replicas.index[name] for name in names if name in replicas.index), None)


def _bounded(preferred: int | None, replicas: Replicas, order: Iterator[int]) -> Iterator[int]:
    """Yield first the preferred replica, the first of `order` or the least loaded: whose load is within the bound."""
    load, most, first = replicas.load, replicas.most, next(order)
    if preferred is not None and load[preferred] <= most:
        chosen = preferred
    elif load[first] <= most:
        chosen = first
    else:
        chosen = load.index(min(load))
    yield chosen
    yield from (i for i in itertools.chain([first], order) if i != chosen)


def _remembering(
    home: OrderedDict[K, str], keys: Iterable[K], replicas: Replicas, order: Iterator[int]
) -> Iterator[int]:
    """Return the order, and remember its first replica as the home of these blocks or sessions."""
    first = next(order)
    for key in keys:
        home[key] = replicas.names[first]
        home.move_to_end(key)
    while len(home) > ENTRIES:
        home.popitem(last=False)
    return itertools.chain([first], order)


def _weight(session: str, name: str) -> bytes:
    return blake2b(f"{session}\0{name}".encode(), digest_size=8).digest()
