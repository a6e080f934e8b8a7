"""Arrival processes: send times, drawn whole before the first request is sent.

All but `closed` are open loop: a slow server delays no send. Gaps are never cut and never rescaled. This module must
not know what is sent.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from terminal.options import nearest

LONGEST = 1e9  # seconds of a run, 32 years; a clock cannot count milliseconds beside much greater numbers

# kind: its form, its meaning, the number of its parameters and the defaults of the last ones.
KINDS: dict[str, tuple[str, str, int, tuple[float, ...]]] = {
    "poisson": ("poisson:RATE", "exponential gaps, RATE requests per second", 1, ()),
    "gamma": ("gamma:RATE:B", "gamma gaps with burstiness B: 1 is Poisson, less is burstier", 2, ()),
    "constant": ("constant:RATE", "equal gaps", 1, ()),
    "onoff": ("onoff:RATE[:S]", "Poisson at twice RATE, silent every other S (10) seconds", 2, (10.0,)),
    "ramp": ("ramp:A:B", "Poisson with a rate that goes from A to B per second over the run", 2, ()),
    "burst": ("burst", "all at once", 0, ()),
    "wait": ("wait:S", "the original's pace: 0 to S seconds between requests", 1, ()),
    "closed": ("closed:N[:Z]", "N users; each sends Z seconds after its last answer", 2, (0.0,)),
    "trace": ("trace:FILE[:F]", "at the times of a trace, F times faster", 0, ()),
}


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process: a kind of `KINDS` with its one or two parameters."""

    kind: str
    value: float = 0.0
    second: float = 0.0

    @property
    def rate(self) -> float:
        """The expected requests per second; infinite when all leave at once or none is set."""
        if self.kind in ("poisson", "gamma", "constant", "onoff"):
            return self.value
        if self.kind == "ramp":
            return (self.value + self.second) / 2
        # The original's sleep(random() * wait) lasts wait / 2 on average.
        return 2 / self.value if self.kind == "wait" and self.value else math.inf

    @property
    def burstiness(self) -> float | None:
        """The shape of the gaps' gamma distribution (1 is Poisson); None for other gaps."""
        if self.kind == "poisson":
            return 1.0
        return self.second if self.kind == "gamma" else None

    @property
    def users(self) -> int | None:
        """The number of users of a closed loop; None for an open loop."""
        return int(self.value) if self.kind == "closed" else None

    @property
    def text(self) -> str:
        """The form that `parse` reads."""
        numbers = [self.value, self.second][: KINDS[self.kind][2]]
        if self.kind == "closed" and not self.second:
            numbers = numbers[:1]
        return ":".join([self.kind, *(f"{number:g}" for number in numbers)])

    def times(self, count: int, rng: np.random.Generator) -> list[float]:
        """Draw `count` ascending send times in seconds; the first is 0. ValueError if the last is after `LONGEST`."""
        with np.errstate(all="ignore"):  # of a rate that is almost 0
            times = self._times(count, rng)
        check_span(times, f"Use a higher rate than {self.text}")
        return times

    def _times(self, count: int, rng: np.random.Generator) -> list[float]:
        gaps = np.zeros(count)
        later = max(count - 1, 0)
        if self.kind == "poisson":
            gaps[1:] = rng.exponential(1 / self.value, later)
        elif self.kind == "gamma":
            gaps[1:] = rng.gamma(self.second, 1 / (self.value * self.second), later)
        elif self.kind == "constant":
            gaps[1:] = 1 / self.value
        elif self.kind == "wait":
            gaps[1:] = rng.random(later) * self.value
        elif self.kind == "onoff":
            gaps[1:] = rng.exponential(0.5 / self.value, later)
            times = np.cumsum(gaps)
            return [float(at) for at in times + np.floor(times / self.second) * self.second]
        elif self.kind == "ramp":
            return self._ramp(np.concatenate([[0.0], np.cumsum(rng.exponential(1, later))]))
        return [float(at) for at in np.cumsum(gaps)]

    def _ramp(self, expected: np.ndarray) -> list[float]:
        """Invert the expected count a·t + (b - a)·t²/2T of a rate that goes from a to b in T."""
        a, b, count = self.value, self.second, len(expected)
        length = 2 * count / (a + b)
        bend = (b - a) / length
        inside = np.minimum(expected, count)
        root = np.sqrt(a * a + 2 * bend * inside)
        times = np.divide(2 * inside, a + root, out=np.zeros(count), where=inside > 0) + (expected - inside) / b
        return [float(at) for at in times]


def check_span(times: Iterable[float], remedy: str) -> None:
    """Raise ValueError with the remedy for a run that goes beyond `LONGEST`."""
    for at in times:
        if not at <= LONGEST:
            raise ValueError(f"a request comes after {at:.3g} s, but a run has at most {LONGEST:,.0f} s. {remedy}")


def parse(text: str) -> Arrivals:
    """Read `kind:number:number`; raise ValueError with the right form."""
    kind, *words = text.split(":")
    if kind == "trace" or kind not in KINDS:
        known = ", ".join(form for form, *_ in KINDS.values() if not form.startswith("trace"))
        guess = "" if kind in KINDS else nearest(kind, KINDS)
        raise ValueError(f"unknown load {text!r}.{guess} Use one of {known}")
    form, _, wanted, defaults = KINDS[kind]
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = [math.nan]
    if len(numbers) < wanted:
        numbers += defaults[len(numbers) - wanted :]
    whole = kind != "closed" or (numbers and numbers[0] == int(numbers[0] or 0))
    zero_is_fine = {"wait": (0,), "closed": (1,), "ramp": (0,)}.get(kind, ())
    bad = [n for i, n in enumerate(numbers) if not (0 < n < 1e9 or (n == 0 and i in zero_is_fine))]
    if len(numbers) != wanted or bad or not whole:
        raise ValueError(f"{text!r} is not a load. Use {form} with numbers above 0")
    return Arrivals(kind, *numbers)
