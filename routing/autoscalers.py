"""How many replicas a fleet wants: the autoscalers, as functions of the load of each replica.

The same functions decide in `simulate fleet` and in front of real servers. They must not know clocks, networks, or how
replicas are started. `Patience` delays a change until it has been wanted long enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

SLACK = 0.7  # `tokens` keeps a replica more as long as the others would be busier than this share of its targets
PROMPT_TOKENS = 4096  # prompt tokens that may wait for each replica before `tokens` wants another one


class Load(NamedTuple):
    """What one replica does now, or did on average over the last seconds.

    A replica that is starting has its capacity and no requests. One that drains is left out.
    """

    running: float = 0  # requests that have a slot
    waiting: float = 0  # requests in the queue
    slots: int = 0  # the most requests that can run at once (--max-batch-size); 0: unknown
    kv_used: float = 0.0  # the share of its KV pages that running requests hold, 0 to 1; 0 where pages are unlimited
    kv_tokens: int = 0  # tokens that its KV pages hold; 0: unknown or unlimited
    waiting_tokens: float = 0  # tokens of the requests in the queue: prompts and the answers they ask for
    prefill_tokens: float = 0  # prompt tokens that are not computed yet, of requests in the queue and of running ones


class Bounds(NamedTuple):
    """The fewest and the most replicas, as in --replicas 2..8."""

    least: int
    most: int


# Returns the number of replicas that are wanted, starting ones included, within the bounds.
Autoscaler = Callable[[Sequence[Load], Bounds], int]


def fixed(replicas: Sequence[Load], bounds: Bounds, target: float = 1.0) -> int:
    """The most replicas at all times (times `target`), as without autoscaling."""
    return _within(math.ceil(bounds.most * target), replicas, bounds)


def requests(replicas: Sequence[Load], bounds: Bounds, target: float = 2.0) -> int:
    """As many that each has `target` requests, running and waiting, however long they are (2: Ray Serve's default)."""
    return _within(math.ceil(sum(load.running + load.waiting for load in replicas) / target), replicas, bounds)


def tokens(replicas: Sequence[Load], bounds: Bounds, target: float = 0.7) -> int:
    """As many that waiting and running requests take `target` of the KV pages or slots, whichever are scarcer.

    More if more than PROMPT_TOKENS of prompts wait for each replica. Between the number that is enough and the one at
    which replicas would be less busy than SLACK of that, it keeps what there is, so that a constant load changes nothing.
    """
    slots, kv_tokens = (max((getattr(load, name) for load in replicas), default=0) for name in ("slots", "kv_tokens"))
    taken = _taken(replicas)
    if slots:
        taken = max(taken, sum(load.running + load.waiting for load in replicas) / slots)
    if kv_tokens:
        taken = max(taken, sum(load.kv_used + load.waiting_tokens / kv_tokens for load in replicas))
    prompts = sum(load.prefill_tokens for load in replicas) / PROMPT_TOKENS
    needed = max(taken / target, prompts)
    return _within(min(max(len(replicas), math.ceil(needed)), math.ceil(needed / SLACK)), replicas, bounds)


AUTOSCALERS: dict[str, Callable[..., int]] = {"fixed": fixed, "requests": requests, "tokens": tokens}


def make(text: str) -> Autoscaler:
    """Return the autoscaler of a text such as tokens, tokens:0.6 or requests:8; ValueError with the right form."""
    name, colon, number = text.partition(":")
    if name not in AUTOSCALERS:
        raise ValueError(f"unknown autoscaler {name!r}. Use one of: {', '.join(AUTOSCALERS)}")
    if not colon:
        return AUTOSCALERS[name]
    try:
        target = float(number)
    except ValueError:
        target = math.nan
    most = math.inf if name == "requests" else 1.0
    if not (0 < target <= most and target < math.inf):
        bound = "a number of requests above 0, as in requests:8" if name == "requests" else f"a share, as in {name}:0.5"
        raise ValueError(f"autoscaler {text!r} has the target {number!r}. Use {bound}")
    return partial(AUTOSCALERS[name], target=target)


class Patience:
    """Lets the number of replicas change when more, or fewer, were wanted without a break for as many seconds.

    Ray Serve's upscale_delay_s and downscale_delay_s work like this. A break is any moment at which the present number,
    or the other direction, was wanted.
    """

    def __init__(self, up: float, down: float) -> None:
        self._delays = {1: up, -1: down}
        self._direction = 0
        self._since = 0.0

    def decide(self, present: int, wanted: int, now: float) -> int:
        """Return the number of replicas to have from now on."""
        direction = (wanted > present) - (wanted < present)
        if direction != self._direction:
            self._direction, self._since = direction, now
        if not direction or now - self._since < self._delays[direction]:
            return present
        self._direction = 0
        return wanted


def _taken(replicas: Sequence[Load]) -> float:
    """Return how many replicas the requests that run now would fill."""
    return sum(max(load.kv_used, load.running / load.slots if load.slots else 0.0) for load in replicas)


def _within(wanted: int, replicas: Sequence[Load], bounds: Bounds) -> int:
    """Return a number within the bounds that, as far as they allow, is enough for the requests that run now."""
    inside = any(load.running or load.waiting for load in replicas)
    enough = max(wanted, math.ceil(_taken(replicas) - 1e-9), int(inside))
    return min(max(enough, bounds.least), bounds.most)
