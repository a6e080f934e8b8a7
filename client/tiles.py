"""The figures of a server's last seconds, counted from its steps by the rules of the live page (`web/model.js`). Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .report import waste

WINDOW = 10.0  # seconds over which the figures are averaged


@dataclass(slots=True)
class Request:
    """What the next token of a request is measured from."""

    arrived: float | None = None
    phase: str = ""  # of its last step with a row: prefill or decode
    prefilled: float = 0.0  # end of the last step of its prompt
    last: float | None = None  # the time of its last token


@dataclass(slots=True)
class Step:
    """A step's record, and the tokens of answers, times to first tokens and gaps between tokens that it adds."""

    record: Mapping[str, Any]
    output: int = 0
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    @property
    def end(self) -> float:
        return float(self.record["t"] + self.record["seconds"])


class Tiles:
    """The steps of the last `WINDOW` seconds, and the requests that have not left."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque()
        self.requests: dict[str, Request] = {}

    def arrival(self, event: Mapping[str, Any]) -> None:
        """Count a request's first token from here."""
        self._request(event["id"]).arrived = event["t"]

    def departure(self, event: Mapping[str, Any]) -> None:
        """Forget a request that left outside a step."""
        self.requests.pop(event["id"], None)

    def add(self, record: Mapping[str, Any]) -> None:
        """Count a step; one that was counted before is ignored."""
        if self.steps and record["n"] <= self.steps[-1].record["n"]:
            return
        step = Step(record)
        wrong = {own["id"]: own["drafted"] - own["accepted"] for own in record.get("drafts", ())}
        for member in record["members"]:
            self._advance(member, step, wrong.get(member["id"], 0))
        for left in record["left"]:
            if (request := self.requests.pop(left["id"], None)) and request.phase == "prefill":
                _first_token(request, step)
        self.steps.append(step)
        while self.steps[0].end <= step.end - WINDOW:
            self.steps.popleft()

    def figures(self, now: float) -> dict[str, Any]:
        """Return the figures of the last seconds before `now` on the server's clock; None where nothing was measured."""
        steps = list(self.steps)
        at = max(now, steps[-1].end) if steps else now
        recent = [step for step in steps if step.end > at - WINDOW]
        spent = {kind: sum(step.record["slot_steps"].get(kind, 0.0) for step in recent) for kind in waste.COLORS}
        drafts = [own for step in recent for own in step.record.get("drafts", ())]
        drafted, accepted = (sum(own[name] for own in drafts) for name in ("drafted", "accepted"))
        ttft50, ttft99 = _p50_p99([first for step in recent for first in step.firsts])
        itl50, itl99 = _p50_p99([gap for step in recent for gap in step.gaps])
        return {
            "tokens/s": sum(step.output for step in recent) / max(at - recent[0].record["t"], 1e-9) if recent else 0.0,
            "step": sum(step.record["seconds"] for step in recent) / len(recent) if recent else None,
            "fill": waste.fill(spent), "wasted": waste.wasted(spent), "accepted": accepted / drafted if drafted else None,
            "TTFT p50": ttft50, "TTFT p99": ttft99, "ITL p50": itl50, "ITL p99": itl99,
            "waste": spent, "steps": len(recent),
        }  # fmt: skip

    def _request(self, id: str) -> Request:
        return self.requests.setdefault(id, Request())

    def _advance(self, member: Mapping[str, Any], step: Step, wrong: int) -> None:
        """Count a request's new tokens: one with the last step of its prompt, then those of each decode that are not wrong."""
        request, phase = self._request(member["id"]), member["phase"]
        if phase == "prefill":
            request.prefilled = step.end
        elif phase == "decode":
            if request.phase == "prefill":
                _first_token(request, step)
            tokens = max(1, member["tokens"] - wrong)
            step.output += tokens
            if request.last is not None:
                step.gaps += [(step.end - request.last) / tokens] * tokens
            request.last = step.end
        else:
            return
        request.phase = phase


def _first_token(request: Request, step: Step) -> None:
    """Count the token of a prompt's last step, known when a decode follows or the request leaves.

    Recomputing after a preemption ends with the next token, not with the first.
    """
    step.output += 1
    if request.last is not None:
        step.gaps.append(request.prefilled - request.last)
    elif request.arrived is not None:
        step.firsts.append(request.prefilled - request.arrived)
    request.last = request.prefilled


def _p50_p99(values: list[float]) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    p50, p99 = np.percentile(values, (50, 99))
    return float(p50), float(p99)
