"""The upstreams: where they are, how many requests each may have at once, and which of them a request goes to."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from random import Random
from urllib.parse import urlsplit

from fleet.routers import ROUTERS, Asked, Replicas, Router

REST_SECONDS = 1.0  # of an upstream that refuses, if it names no time
LONGEST_REST, SHORTEST_REST = 60.0, 0.05
LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass
class Site:
    """One upstream; `slots` are 0 until they are known.

    With `own`, it is a server of this project that others can stand in for, and tells what routers may know of it.
    """

    name: str
    url: str
    slots: int
    open: int = 0
    rests_until: float = 0.0
    refuses_since: float = math.inf  # until it takes a request after a rest
    tries: int = 1  # requests at once that find out whether it does
    refusals: int = 0
    failures: int = 0
    down_since: float | None = None  # time.time() of the first try that did not reach it
    own: bool = False
    kv_free: float = 1.0
    prefill_tokens: int = 0


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

    @property
    def refuse_since(self) -> float:
        """The time since which no upstream takes requests, inf if one does."""
        return max((site.refuses_since for site in self.all), default=math.inf)

    def order(self, able: list[Site], load: list[int], asked: Asked) -> Iterator[int]:
        """Yield the places of the upstreams that can take a request, the best first; `load` is how many each has."""
        told = [site for site in able if site.own]
        facts = Replicas(
            [site.name for site in able], load, [site.kv_free for site in told], [site.prefill_tokens for site in told]
        )
        return self._route(facts, asked)

    @property
    def remembers(self) -> bool:
        """Whether the router must see each request, even if it has no choice."""
        return self.router in ("prefix-aware", "session-sticky")

    def rest(self, site: Site, headers: Mapping[str, str]) -> float:
        """Send an upstream nothing for as long as its refusal asks for; return the seconds until one can take a request."""
        site.refusals += 1
        site.refuses_since = min(site.refuses_since, self.clock())
        site.rests_until = self.clock() + retry_after(headers)
        return max(SHORTEST_REST, min([site.rests_until for site in self.all] or [site.rests_until]) - self.clock())


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


def meaning(url: str) -> tuple[str, int, str]:
    """Return host, port and path of a URL; different spellings of an address give the same result."""
    parts = urlsplit(url)
    host = str(parts.hostname).rstrip(".")
    with contextlib.suppress(ValueError):
        host = ip_address(host).compressed
    host = LOCAL[0] if host in (*LOCAL, "0.0.0.0", "::") else host
    return host, parts.port or (443 if parts.scheme == "https" else 80), parts.path.rstrip("/")
