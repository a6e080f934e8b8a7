"""The least time that a request takes of a machine, as each law of a step's time has it: alone, and shared with others.

A step lasts at least as long as the sum of the shares of its rows, whichever rows these are: costs that a step has once,
such as the reading of weights, are divided among the most rows that it can have. This module must not know policies, or
what is concluded from shares.

Source of the formulas: the laws of `costs.py`; each inequality is proved where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from costs.cost import Affine, Cost, Host, Phases, Scaled
from costs.steps import decoding, prefilling

TILTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # how much of a hinge is charged to tokens; any of them gives a bound


@dataclass(frozen=True)
class Shares:
    """Seconds of the machine that the work of one request takes at least, whatever runs beside it.

    A request with p prompt tokens and o output tokens takes `prompt + token p + pair p (p + 1) / 2` for its first token, and
    `row + context (p + i)` for the i-th of the o - 1 others. `alone_...` are the same when nothing runs beside it: of these,
    `step` is paid once by all rows of a decode, and `prefill` once by all prompts of a step. With `even`, no piece of a
    prompt uses its time better than the whole prompt does.
    """

    row: float
    context: float = 0.0
    prompt: float = 0.0
    token: float = 0.0
    pair: float = 0.0
    alone_row: float = 0.0
    alone_prompt: float = 0.0
    alone_token: float = 0.0
    step: float = 0.0
    prefill: float = 0.0
    even: bool = False

    def alone(self, prompt: int, output: int) -> float:
        """Return the seconds of a request when nothing runs beside it."""
        m = max(0, output - 1)
        first = self.alone_prompt + self.alone_token * prompt + self.pair * prompt * (prompt + 1) / 2
        return first + (self.alone_row + self.context * prompt) * m + self.context * m * (m + 1) / 2


def unwrapped(cost: Cost) -> tuple[Cost, float]:
    """Return the law itself, and by which factor its times are longer; padding, of graphs too, only adds to it."""
    factor = 1.0
    while isinstance(cost, Scaled):
        factor *= cost.factor
        cost = cost.law
    return replace(cost, buckets=()) if isinstance(cost, Affine) else cost, factor


def shares_of(cost: Cost, slots: int, host: Host) -> list[Shares]:
    """Return shares that hold for a law with up to `slots` rows a step; each gives a bound, and the best counts."""
    cost, factor = unwrapped(cost)
    if isinstance(cost, Affine):
        tilted = [_of_affine(cost, slots, host, factor, tilt) for tilt in (TILTS if cost.hinge else TILTS[:1])]
        return [
            shares for shares in tilted if min(shares.row, shares.prompt - host.alpha2) >= 0
        ]  # else one step more would take less than no time
    if isinstance(cost, Phases):
        return [_of_phases(cost, slots, host, factor)]
    return [_of_rows(cost, slots, host, factor)]


def _of_affine(law: Affine, slots: int, host: Host, factor: float, tilt: float) -> Shares:
    """Return the shares of an affine law.

    Let R be the base, the experts that s tokens need, and the hinge above what is `tilted` to each token, of a step of
    s rows and n >= s tokens. R >= s least, where least is the minimum of R / s over all s <= slots; R is convex in n and
    smallest at the knee or at n = s. Alone, a step needs the experts of one token at least.
    """
    base, hinge = law.base * factor + host.sigma, law.hinge * factor
    tilted = tilt * hinge
    s = np.arange(1, slots + 1)
    n = np.maximum(s, law.knee) if tilt else s
    experts = law.experts * (1 - (1 - law.chosen) ** s) * factor
    least = float(((base + experts - tilted * n + hinge * np.maximum(n - law.knee, 0)) / s).min())
    base += float(experts[0])
    prefill = law.prefill * factor
    return Shares(
        row=least + law.decode * factor + tilted + host.alpha2,
        context=law.context * factor,
        prompt=least + law.start * factor + prefill / slots + host.alpha2,
        token=law.prompt * factor + tilted,
        pair=law.pair * factor,
        alone_row=base + law.decode * factor + hinge * max(0, 1 - law.knee) + host.alpha2,
        alone_prompt=base + prefill + law.start * factor + host.alpha2,
        alone_token=law.prompt * factor,
        step=base,
        prefill=base + prefill,
        even=not hinge,
    )


def _of_phases(law: Phases, slots: int, host: Host, factor: float) -> Shares:
    """Return the shares of a law with two phases: each is paid apart, and its constant shared by `slots` rows at most.

    In pieces of one token a prompt's squares sum up to its length.
    """
    s = np.arange(1, slots + 1)
    row = float(((law.base + law.row * np.maximum(s - law.knee, 0)) / s).min()) * factor
    rest = host.sigma / slots + host.alpha2
    return Shares(
        row=row + rest,
        context=law.context * factor,
        prompt=(law.start / slots + law.request) * factor + rest,
        token=(law.token + law.square) * factor,
        alone_row=(law.base + law.row * max(0.0, 1 - law.knee)) * factor + host.sigma + host.alpha2,
        alone_prompt=(law.start + law.request) * factor + host.sigma + host.alpha2,
        alone_token=(law.token + law.square) * factor,
        step=law.base * factor + host.sigma,
        prefill=law.start * factor + host.sigma,
        even=not law.square,
    )


def _of_rows(law: Cost, slots: int, host: Host, factor: float) -> Shares:
    """Return the shares of any law in which a step of more rows, tokens or context never takes less time.

    What a row takes is the least time of a step of s rows, one of which may begin a prompt, over s; that prompts are longer
    than one token is left out.
    """
    rows = []
    for s in range(1, slots + 1):
        with_prompt = decoding(s - 1, 2 * (s - 1), 2)._replace(
            prefills=1, prompt=1, pairs=1.0, squares=1, longest=1 if s == 1 else 2, widest=1, work=2 * s - 1
        )
        rows.append((min(law.seconds(decoding(s, 2 * s, 2)), law.seconds(with_prompt)) * factor + host.sigma) / s)
    least = min(rows) + host.alpha2
    step = min(rows[0], law.seconds(decoding(1, 2, 2)) * factor + host.sigma)
    prefill = law.seconds(prefilling(1)) * factor + host.sigma
    return Shares(
        row=least,
        prompt=least,
        alone_row=step + host.alpha2,
        alone_prompt=prefill + host.alpha2,
        step=step,
        prefill=prefill,
    )
