"""One case to try a policy on: requests with whole-number times, and what there is to serve them with."""

from __future__ import annotations

from dataclasses import dataclass

from scheduling.pages import PagePool
from scheduling.sequence import Sequence

ENDLESS = 1 << 60  # the tokens of a step where there is no limit


@dataclass(frozen=True)
class Request:
    """What a client wants; times are whole numbers of no unit."""

    arrival: int
    prompt: tuple[int, ...]
    output: int
    client: str = "a"
    priority: int = 0
    deadline: float | None = None
    open_ended: bool = False
    adapter: str = ""
    program: str = ""


@dataclass(frozen=True)
class Case:
    """Requests in order of arrival, and the slots, tokens and pages that serve them.

    `pages` is (pages, tokens of a page), or None for unlimited KV. Requests join with pages for a `margin` of tokens
    beside their own, unless the policy reserves their whole answers. `cancels` are pairs of a step, before which a
    request is cancelled, and its index among those inside. With `drafts`, (number or 0 for as many as are worth it, n),
    tokens are proposed, each n-th of them wrong.
    """

    requests: tuple[Request, ...]
    slots: int = 2
    budget: int = ENDLESS
    pages: tuple[int, int] | None = None
    margin: int = 64
    prefix_cache: bool = False
    drains: bool = True
    cancels: tuple[tuple[int, int], ...] = ()
    drafts: tuple[int, int] | None = None

    def sequences(self, backwards: bool = False) -> list[Sequence]:
        """Return fresh sequences r0, r1, ...; `backwards`, they lie the other way round in memory."""
        numbered = list(enumerate(self.requests))
        fresh = [
            Sequence(
                list(r.prompt), r.output, id=f"r{i}", arrived_at=r.arrival, client=r.client,
                priority=r.priority, deadline=r.deadline, open_ended=r.open_ended,
                adapter=r.adapter, cache_salt=r.adapter, program=r.program,
            )
            for i, r in (reversed(numbered) if backwards else numbered)
        ]  # fmt: skip
        return fresh[::-1] if backwards else fresh

    def pool(self) -> PagePool | None:
        """Return a fresh pool of the case's pages, None for unlimited KV."""
        if self.pages is None:
            return None
        return PagePool(*self.pages, prefix_cache=self.prefix_cache, salt="check")
