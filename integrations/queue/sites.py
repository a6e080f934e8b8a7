"""The upstreams: where they are, how many requests each may have at once, and which of them a request goes to."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from urllib.parse import urlsplit

from routing.routers import ROUTERS, Replicas, Router, RoutingKey

REST_SECONDS = 1.0  # of an upstream that refuses, if it names no time, or that fails while no other takes requests
FIRST_REST = 5.0  # of one that fails while another takes requests; each further rest is twice as long
LONGEST_REST, SHORTEST_REST = 60.0, 0.05
EVERYONE = ""  # whose requests an upstream does not get, if not those of one client
MOST_RESTS = 1000  # of single clients at one upstream
LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass
class Rest:
    """A time without requests to an upstream, from everyone or from one client; then a few try, until one is taken.

    After a failure, one tries at a time, for however long it takes; after a cut answer, it must get a whole one.
    """

    why: str
    since: float
    until: float = 0.0
    ends: float = 0.0  # when the last rest ended that the upstream asked for
    most: int = 1  # requests that may try, before others wait for `pause` seconds
    pause: float = 0.0
    is_cut: bool = False
    tried: int = 0
    open: int = 0  # that try now
    clock: Callable[[], float] = time.monotonic

    @property
    def is_failure(self) -> bool:
        """Whether it is due to a failure, not to a refusal."""
        return self.pause == math.inf

    @property
    def is_over(self) -> bool:
        return self.until <= self.clock()

    def enter(self) -> None:
        """Note that a request tries."""
        self.open, self.tried = self.open + 1, self.tried + 1
        if self.tried >= self.most:
            self.tried, self.until = 0, self.clock() + self.pause

    def leave(self) -> None:
        """Note that a request tries no more; the next may, if nothing was found out."""
        self.open -= 1
        if self.until == math.inf and not self.open:
            self.until = self.clock()

    def extend(self, seconds: float, pause: float) -> None:
        """Rest for this many more seconds."""
        self.until, self.pause, self.tried = self.clock() + seconds, pause, 0


@dataclass
class Site:
    """One upstream; `slots` are 0 until they are known.

    With `own`, it is a server of this project that others can stand in for, and tells what routers may know of it.
    """

    name: str
    url: str
    slots: int
    open: int = 0
    rests: dict[str, Rest] = field(default_factory=dict)  # EVERYONE's alone, or those of clients
    taken_at: float = -math.inf  # when it last took a request
    heard_at: float = -math.inf  # when it last sent anything
    strikes: int = 1  # failures since its last whole answer; the first one after an answer is forgiven
    refusals: int = 0
    failures: int = 0
    down_since: float | None = None  # time.time() of the first try that did not reach it
    own: bool = False
    kv_free: float = 1.0
    prefill_tokens: int = 0

    @property
    def rest(self) -> Rest | None:
        """The rest from all requests, if it takes none."""
        return self.rests.get(EVERYONE)

    @property
    def may_be_asked(self) -> bool:
        return self.rest is None or self.rest.is_over

    @property
    def failing(self) -> str | None:
        """How it fails, if that is why it rests."""
        return self.rest.why if self.rest is not None and self.rest.is_failure else None

    def rest_from(self, whose: str) -> Rest | None:
        """Return the rest from the requests of this client, if there is one."""
        return self.rest or self.rests.get(whose)

    def accept(self, now: float, rest: Rest | None, is_whole: bool = False) -> None:
        """Note that it took a request, which tried after a rest if there was one, and whether its answer is whole."""
        self.taken_at = now
        if is_whole:
            self.strikes = 0
        if rest is not None and (is_whole or not rest.is_cut):
            self.rests = {whose: one for whose, one in self.rests.items() if one is not rest}


@dataclass
class Sites:
    """All upstreams, and the router among those that can take a request now.

    With `usual`, the slots of an upstream that comes later, they come and go (`Upstreams.update`).
    """

    all: list[Site]
    router: str = "least-loaded"
    usual: int = 0
    clock: Callable[[], float] = time.monotonic
    _route: Router = field(init=False)

    def __post_init__(self) -> None:
        self._route = ROUTERS[self.router](Random(0))

    @property
    def slots(self) -> int:
        return sum(site.slots for site in self.all)

    @property
    def most(self) -> int:
        """The slots of the upstream with the most."""
        return max([self.usual, *(site.slots for site in self.all)])

    def order(self, able: list[Site], load: list[int], key: RoutingKey) -> Iterator[int]:
        """Yield the places of the upstreams that can take a request, the best first; `load` is how many each has."""
        own = [site for site in able if site.own]
        facts = Replicas(
            [site.name for site in able], load, [site.kv_free for site in own], [site.prefill_tokens for site in own]
        )
        return self._route(facts, key)

    def refuse(self, site: Site, whose: str, tried: Rest | None, headers: Mapping[str, str]) -> None:
        """Send an upstream nothing of this client for as long as its refusal asks for.

        If it has refused another key before and taken nothing since, it gets nothing from anybody. A refused request may
        be at fault, so that after each rest one more tries beside it.
        """
        site.refusals += 1
        now, why = self.clock(), f"{site.name} refuses requests"
        rests = {
            one: rest for one, rest in site.rests.items() if one in (EVERYONE, whose) or not rest.is_over or rest.open
        }
        key = whose.partition(":")[0]
        others = [rest.since for one, rest in rests.items() if one.partition(":")[0] != key]
        if site.rest or max(others, default=-math.inf) > site.taken_at:
            whose, rests = EVERYONE, {EVERYONE: site.rest or Rest(why, now)}
        rest = rests.setdefault(whose, Rest(f"{why} with this key for this model" if whose else why, now))
        if len(rests) > MOST_RESTS:  # a client may name any number of models; the oldest rest ends sooner
            del rests[next(iter(rests))]
        rest.most += rest is tried and rest.ends < now
        rest.extend(retry_after(headers), math.inf if rest.is_failure else REST_SECONDS)
        rest.ends, site.rests = rest.until, rests

    def fail(self, site: Site, tried: Rest | None, why: str, *, at_once: bool = False, is_cut: bool = False) -> None:
        """Note that an upstream failed: it rests, each time twice as long, unless that was the first time after an answer.

        While no other takes requests, rests are short. Requests that it got before its rest say nothing new.
        """
        site.failures += 1
        rest, now = site.rest, self.clock()
        if rest is not None and rest is not tried:
            return
        site.strikes = max(site.strikes + 1, 2 if at_once else 0)
        if site.strikes < 2:
            return
        rest = rest or Rest("", now)
        rest.why, rest.is_cut, site.rests = f"{site.name} {why}", is_cut, {EVERYONE: rest}
        takes = any(one.rest is None for one in self.all)
        rest.extend(min(FIRST_REST * 2 ** min(site.strikes - 2, 9), LONGEST_REST) if takes else REST_SECONDS, math.inf)
        for one in self.all:
            if not takes and one.failing and one.rest is not None and one.rest.until < math.inf:
                one.rest.until = min(one.rest.until, now + REST_SECONDS)

    def refusal(self, whose: str, tried: Collection[str]) -> tuple[Rest, float] | None:
        """Return which rest keeps a client's request from all upstreams, and since when one does; None if it may be taken.

        It may go to none of `tried`. The rest is that which ends first.
        """
        rests = [site.rest_from(whose) for site in self.all if site.name not in tried]
        held = [rest for rest in rests if rest is not None and not rest.open]
        if not held or len(held) < len(rests):
            return None
        return min(held, key=lambda rest: rest.until), max(rest.since for rest in held)


def retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds of a Retry-After, within bounds; a date or nonsense counts as absent."""
    try:
        seconds = float(headers.get("Retry-After", ""))
    except ValueError:
        return REST_SECONDS
    return min(max(seconds, SHORTEST_REST), LONGEST_REST) if math.isfinite(seconds) else REST_SECONDS


def read_site(text: str) -> Site:
    """Read an upstream of the command line, `URL` or `URL#SLOTS`; ValueError with the remedy."""
    url, _, own = text.partition("#")
    try:
        parts = urlsplit(url)
        address = f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
    except ValueError:
        parts, address = urlsplit(""), ""
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username is not None:
        raise ValueError(f"{text!r} is not http://HOST:PORT or https://HOST[/PATH]. Write it as http://127.0.0.1:11434")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"{text!r} ends with /v1, which clients send themselves. Use {url.rstrip('/')[:-3]}")
    if own and (not own.isdecimal() or not 1 <= int(own) <= 4096):
        raise ValueError(f"{text!r} ends with {own!r}, but the number after # must be slots, 1 to 4096. Use {url}#4")
    return Site(address, url.rstrip("/"), int(own or 0))
