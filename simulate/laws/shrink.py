"""Make a case smaller as long as it still shows its finding: a broken law, or a slow policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, TypeVar

from simulate.laws.case import ENDLESS, Case, Request

EFFORT = 300_000  # requests and tokens that are served again at most

Found = TypeVar("Found")


def effort(case: Case) -> int:
    """Return about how much work it is to try a case."""
    return sum(2 + r.output + len(r.prompt) // 32 for r in case.requests)


class Shrinker(Generic[Found]):
    """Removes parts of a case; a part stays out if `again`, which tries the simpler case, still returns a finding."""

    def __init__(self, again: Callable[[Case], Found | None], case: Case, found: Found) -> None:
        self.again = again
        self.case = case
        self.found = found
        self.left = EFFORT
        self.tried = {case}  # requests that are alike can be left out in many ways that are the same case

    def run(self) -> tuple[Found, Case]:
        """Return what the smallest case found shows, and that case."""
        many = len(self.case.requests)
        for finest in (many // 4, many // 32):
            self._simplify_all(max(1, finest))
        before = None
        while before is not self.case:
            before = self.case
            self._simplify_all(1)
            for i in range(len(self.case.requests)):
                self._simplify(partial(_simpler_request, i=i))
        return self.found, self.case

    def _simplify_all(self, finest: int) -> None:
        """Leave requests out, half of them at first and `finest` at a time at last; then simplify the remaining ones."""
        size = max(1, len(self.case.requests) // 2)
        while size >= finest:
            start = 0
            while start < len(self.case.requests):
                requests = self.case.requests
                rest = requests[:start] + requests[start + size :]
                if not rest or not self._still_shows(dataclasses.replace(self.case, requests=rest)):
                    start += size
            size //= 2
        self._simplify(_simpler_requests)
        self._simplify(_simpler_room)

    def _simplify(self, simpler: Callable[[Case], Iterator[Case]]) -> None:
        while any(self._still_shows(case) for case in simpler(self.case)):
            pass

    def _still_shows(self, case: Case) -> bool:
        """Whether a simpler case shows it too; it is the one to go on from then."""
        if case in self.tried or self.left <= 0:
            return False
        self.tried.add(case)
        self.left -= effort(case)
        found = self.again(case)
        if found is None:
            return False
        self.case, self.found = case, found
        return True


def _simpler_room(case: Case) -> Iterator[Case]:
    """Yield cases with fewer cancellations and limits, or fewer slots."""

    def but(**changes: object) -> Case:
        return dataclasses.replace(case, **changes)  # type: ignore[arg-type]

    if case.cancels:
        yield but(cancels=())
        yield from (but(cancels=case.cancels[:i] + case.cancels[i + 1 :]) for i in range(len(case.cancels)))
    if case.drafts:
        yield but(drafts=None)
    if case.pages:
        yield but(pages=None, prefix_cache=False)
    if case.budget < ENDLESS:
        yield but(budget=ENDLESS)
    yield from (but(slots=slots) for slots in (1, 2, 3, 4, case.slots // 2) if 0 < slots < case.slots)
    if case.slots > 1:
        yield but(slots=case.slots - 1)


def _simpler_requests(case: Case) -> Iterator[Case]:
    """Yield cases in which all requests are simpler in one respect."""
    changes: list[Callable[[Request], dict[str, object]]] = [
        lambda r: {"arrival": 0},
        lambda r: {"prompt": r.prompt[:1]},
        lambda r: {"output": 1},
        lambda r: {"client": "a"},
        lambda r: {"priority": 0},
        lambda r: {"deadline": None},
        lambda r: {"open_ended": False},
        lambda r: {"adapter": "", "program": ""},
        lambda r: {"arrival": r.arrival // 2},
        lambda r: {"prompt": r.prompt[: (len(r.prompt) + 1) // 2]},
        lambda r: {"output": (r.output + 1) // 2},
    ]
    for change in changes:
        requests = (dataclasses.replace(r, **change(r)) for r in case.requests)  # type: ignore[arg-type]
        yield dataclasses.replace(case, requests=tuple(requests))


def _simpler_request(case: Case, i: int) -> Iterator[Case]:
    """Yield cases in which one request asks for less. Arrivals only move to the beginning."""
    request = case.requests[i]
    size, output = len(request.prompt), request.output
    changes: list[dict[str, object]] = [
        {"prompt": request.prompt[: max(1, size // 2)]},
        {"prompt": request.prompt[: max(1, size - 1)]},
        {"output": max(1, output // 2)},
        {"output": max(1, output - 1)},
        {"arrival": 0},
        {"arrival": request.arrival // 2},
        {"deadline": None, "priority": 0, "client": "a", "open_ended": False, "adapter": "", "program": ""},
    ]
    for change in changes:
        simpler = dataclasses.replace(request, **change)  # type: ignore[arg-type]
        requests = (*case.requests[:i], simpler, *case.requests[i + 1 :])
        yield dataclasses.replace(case, requests=requests)
