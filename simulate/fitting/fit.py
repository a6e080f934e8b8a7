"""The law of another server's steps, from a log of its requests, which has no step times.

A simulation of the log, with that server's scheduler and some law, says which steps lie between measured times. Their terms,
summed, times the constants of the law must be the time between: a linear problem. A simulation with the new constants has other
steps, and so on until nothing changes. This module must not know the format of a log, or what a scheduler decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType
from typing import Any

import numpy as np

from costs.cost import Affine, Host
from costs.steps import seen_in
from simulate.engines.known import Kind
from simulate.fitting.equations import APART, SHORTEST, Equations, Intervals, Trajectory
from simulate.fitting.fitted import MORE, Fitted, held, measured
from simulate.logs.log import Log
from simulate.measured.calibrate import BUCKETS, CHOSEN, EARNED, KNEES
from simulate.measured.intervals import DRAWS, WORST, Noise
from simulate.measured.least_squares import TERMS, law_of, solve
from simulate.scenario import Scenario
from simulate.trace import Trace

ROUNDS, MORE_ROUNDS = 10, 4  # of simulating and solving: with a usual law, and with one that is near
SETTLED = 3  # rounds without a better one after which no more follow
LEAST = 0.02  # the error of the root of an interval, in its own unit: no law is exact. A larger one pulls it to what is usual
SCALES = (0.98, 1.02, 0.99, 1.01, 0.995, 1.005)
SPENT = 0.005  # of the error is not worth a switch of the law
FEW = 20  # requests with times, for a law without a doubt
DOUBTFUL = 0.05  # mean error of single requests of the log itself
UNKNOWN_ERROR = 0.3  # of statistics, in logarithms, where no requests are left to measure it
BLOCKS = 10  # of time, whose sums show how the pace wanders
CHECK = "Check --engine and its settings, and that the log begins while the server is idle"
KV_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6)  # of the tokens that requests seem to hold
SWITCHES = 2  # of the shape of a law that may follow each other
SHAPES: Mapping[str, Sequence[Any]] = {"chosen": (1 / 64, *CHOSEN), "knee": KNEES, "buckets": ((), BUCKETS[1])}
NO_LAW = 2.5  # the misfit of a law of zeros is 3, one for each kind of time
WAKE = 0.005  # seconds at most in which an idle server begins, with all that came meanwhile
MANY = 600  # requests that show the shape of a law; more only show its constants
# What is usual, as a part of `base`: a GPU computes about 200 tokens while it reads the weights, a processor about two. Each
# may be wrong by its own size. It matters only for what a log does not say: with 128 rows in all steps, rows, context and base
# are one thing.
GPU = {"decode": 1 / 600, "prompt": 1 / 200, "context": 1 / 120_000, "pair": 4e-7, "prefill": 0.7}
PROCESSOR = {"decode": 1 / 2, "prompt": 1 / 2, "context": 1 / 1000, "pair": 1e-4, "prefill": 0.3}
BASE_OF_PACE = 0.6  # of the time per token


def constants_of(data: Equations, base: float, parts: Mapping[str, float]) -> np.ndarray:
    """Return the constants of the terms, of the very first step, and of an arrival."""
    usual = np.zeros((len(parts), data.terms.shape[1]))
    for row, (name, part) in zip(usual, parts.items()):
        row[TERMS.index(name)], row[0] = 1 / (part * base), -1 / base
    return solve(data.terms, data.seconds, data.error, data.weight, usual, LEAST)


@dataclass(frozen=True)
class Found:
    """A law with its simulation, and the mean absolute errors of single requests, relative to the mean."""

    scenario: Scenario[Trace]
    way: Trajectory
    errors: dict[str, float]

    @property
    def law(self) -> Affine:
        assert isinstance(self.scenario.cost, Affine)
        return self.scenario.cost

    @property
    def misfit(self) -> float:
        return sum(self.errors.values())

    @property
    def constants(self) -> np.ndarray:
        """The constants of the terms, of the very first step, and of an arrival."""
        host = self.scenario.host
        return np.array([*(getattr(self.law, name) for name in TERMS), host.first_step, host.alpha0])


def errors(log: Log, first: np.ndarray, last: np.ndarray) -> dict[str, float]:
    """Return the mean absolute errors of TTFT, latency and decode time of single requests, relative to their means."""
    pairs = {
        "ttft": (first - log.at, log.first - log.at),
        "latency": (last - log.at, log.last - log.at),
        "decode": (last - first, log.last - log.first),
    }
    result = {}
    for name, (simulated, real) in pairs.items():
        both = np.isfinite(simulated) & np.isfinite(real)
        mean = float(real[both].mean()) if both.any() else 0.0
        result[name] = float(np.abs(simulated - real)[both].mean()) / mean if mean > 0 else float((real > 0).any())
    return result


def _stands_still(law: Affine) -> bool:
    """Whether a step without prompts takes no time, so that a simulation may never end."""
    return not (law.base or law.decode or law.experts)


class Search:
    """The search for a law under one scheduler with its settings; `usual` parts of the base are where it begins."""

    def __init__(
        self, log: Log, scenario: Scenario[Trace], tick: Callable[[], None], usual: Mapping[str, float] = GPU
    ) -> None:
        self.log, self.scenario, self.tick, self.usual = log, scenario, tick, usual
        self.until = float(np.nanmax(log.last))

    def simulate(self, law: Affine, host: Host) -> Found:
        """Return a law with its simulation."""
        self.tick()
        scenario = replace(self.scenario, cost=law, host=host)
        way = Trajectory(self.log, scenario, self.until)
        return Found(scenario, way, errors(self.log, way.first, way.last))

    def begin(self) -> Affine:
        """Return a law to begin with: the base is most of the median time per token, the rest is as usual."""
        tokens = self.log.output - 1
        known = np.isfinite(self.log.first) & np.isfinite(self.log.last) & (tokens > 0)
        if not known.any():
            raise ValueError("no answer of the log has times of two tokens. Record longer, streamed answers")
        base = BASE_OF_PACE * max(1e-6, float(np.median((self.log.last - self.log.first)[known] / tokens[known])))
        usual: dict[str, Any] = {name: base * part for name, part in self.usual.items()}
        return Affine(base, **usual)

    def settle(self, law: Affine, host: Host, rounds: int = ROUNDS) -> Found:
        """Simulate and solve in turn, and return the law with the least error of single requests."""
        best, number_of_best = self.simulate(law, host), 0
        now = best
        for number in range(1, rounds):
            found = self.solve(Intervals(self.log, now.way, law).equations(), now.law)
            if _stands_still(law_of(found, law)):
                break
            if number > SETTLED:  # where the order of preemptions flips back and forth
                found = (found + now.constants) / 2
            if np.allclose(found[: len(TERMS)], now.constants[: len(TERMS)], rtol=1e-4, atol=0):
                break
            first_step, arrival = map(float, found[len(TERMS) :])
            now = self.simulate(law_of(found, law), replace(host, alpha0=arrival, first_step=first_step))
            if now.misfit < best.misfit:
                best, number_of_best = now, number
            elif number - number_of_best >= SETTLED:
                break
        return best

    def solve(self, data: Equations, law: Affine) -> np.ndarray:
        return constants_of(data, max(law.base + law.experts, 1e-5), self.usual)

    def shaped(self, best: Found) -> Found:
        """Return a law with the share of experts, knee and buckets that each leave a clearly smaller error, or `best`.

        Of each, the one that explains the steps of the best law best is simulated.
        """
        for _ in range(SWITCHES):
            shapes = [
                min(
                    (self._left(best, name, value) for value in some if value != getattr(best.law, name)),
                    key=lambda pair: pair[0],
                )
                for name, some in SHAPES.items()
            ]
            for _, law in sorted((pair for pair in shapes if not _stands_still(pair[1])), key=lambda pair: pair[0]):
                other = self.settle(law, best.scenario.host, MORE_ROUNDS)
                if other.misfit < EARNED * best.misfit - SPENT:
                    best = other
                    break
            else:
                break
        return best

    def _left(self, best: Found, name: str, value: Any) -> tuple[float, Affine]:
        """Return what another shape of the law leaves unexplained of the intervals of the best one's steps, and its law."""
        changed: dict[str, Any] = {name: value}
        law = replace(best.law, **changed)
        data = Intervals(self.log, best.way, law).equations()
        found = self.solve(data, best.law)
        off = np.abs(data.terms @ found - data.seconds) / data.error
        return float(data.weight @ off), law_of(found, law)

    def scaled(self, best: Found) -> Found:
        """Return the best of laws that are a little slower or faster: a queue near its capacity knows the pace exactly."""
        law, host, constants = best.law, best.scenario.host, best.constants
        for factor in SCALES:
            now = self.simulate(law_of(factor * constants, law), host)
            best = min(best, now, key=lambda found: found.misfit)
        return best


def fit(
    log: Log,
    kind: Kind,
    given: Mapping[str, Any] = MappingProxyType({}),
    tick: Callable[[int], None] = lambda count: None,
) -> Fitted:
    """Fit a server's law, and the settings that neither `given` nor the log says, to all times of a log.

    `tick` is called with the number of simulations so far. ValueError if the log has too few times.
    """
    known = int((np.isfinite(log.first) & np.isfinite(log.last)).sum())
    chosen, engine, sources = kind.serve(log.server, given)
    if 0 < engine.kv_tokens < (longest := log.longest) - 1:  # the last token is never read
        raise ValueError(
            f"the KV memory has room for {engine.kv_tokens:,} tokens, but a request of the log has {longest:,}. Use a larger --kv-tokens"
        )
    part = log.until(int(np.flatnonzero(np.isfinite(log.last))[min(known, MANY) - 1]) + 1)
    scenario = Scenario((chosen,), engine, Affine(), Host(), log.trace, (chosen.policy(engine.slots),))
    done = count(1)
    searches = [Search(part, scenario, lambda: tick(next(done)), usual) for usual in (GPU, PROCESSOR)]
    found = [s.settle(law := s.begin(), Host(wake=min(WAKE, law.base / 4))) for s in searches]
    # Of short prompts alone, both explain as much, but a processor's law makes long ones up to ten times as slow.
    processor = found[1].misfit < EARNED * found[0].misfit - SPENT
    search, best = searches[processor], found[processor]
    if best.misfit > NO_LAW:
        raise ValueError(f"the log cannot be fitted: {next(_doubts(log, best, known))}")
    best, fitted = _settings(search, best, sources)
    search.scenario = best.scenario
    best = search.shaped(best)
    if known > MANY:
        search = Search(log, best.scenario, search.tick, search.usual)
        best = search.settle(best.law, best.scenario.host, MORE_ROUNDS)
    best = search.scaled(best)
    noise = _noise(log, best, search)
    doubts, seen = tuple(_doubts(log, best, known)), seen_in(best.way.steps)
    return Fitted(best.scenario, replace(noise, seen=seen), log, kind, sources | fitted, best.errors, seen, doubts)


def _settings(search: Search, best: Found, sources: Mapping[str, str]) -> tuple[Found, dict[str, str]]:
    """Return the fit with the slots and the KV memory that explain the log best, where only usual ones are known."""
    rows, tokens = held(log := search.log, log.first, log.last)
    fitted: dict[str, str] = {}
    engine = best.scenario.engine
    usual = {name: getattr(engine, name) for name in ("kv_tokens", "slots")}
    tries = [
        ("kv_tokens", size) for share in KV_SHARES
        if rows < engine.slots and (size := int(share * tokens)) >= log.longest + 2 * engine.page_size  # else it never runs
    ]  # fmt: skip
    tries += [("slots", rows), *usual.items()]  # at the end, whether a usual one explains it as well after all
    for name, value in tries:
        engine = best.scenario.engine
        if sources[name] != "usual" or value == getattr(engine, name):
            continue
        settings: dict[str, Any] = {name: value}
        policy = best.scenario.policies[0].policy(value if name == "slots" else engine.slots)
        search.scenario = replace(best.scenario, engine=replace(engine, **settings), asked=(policy,))
        other = search.settle(best.law, best.scenario.host, MORE_ROUNDS)
        if value == usual[name] and EARNED * other.misfit - SPENT <= best.misfit:
            best = other
            fitted.pop(name)
        elif other.misfit < EARNED * best.misfit - SPENT:
            best, fitted[name] = other, "fitted"
    return best, fitted


def _noise(log: Log, best: Found, search: Search) -> Noise:
    """Return what the law leaves unexplained, by a law fitted to the first half and its errors in the second."""
    data = Intervals(log, best.way, best.law).equations()
    predicted = np.maximum(data.terms @ best.constants, data.seconds / WORST)
    order = np.argsort(data.ends)
    # An interval is a sum of steps, whose noise is larger; that of a few steps is of the streams. Their order says nothing: they overlap.
    long = data.steps >= APART if (data.steps >= APART).any() else data.steps > 0
    residuals = np.clip(np.log(data.seconds / predicted) * np.sqrt(data.steps), -1, 1)[long]
    np.random.default_rng(0).shuffle(residuals)
    residuals -= np.log(np.exp(residuals).mean())  # on average, steps take as long as the law says
    blocks = [block for block in np.array_split(order, BLOCKS) if len(block)]
    drift = drift_of(np.array([np.log(data.seconds[b].sum() / predicted[b].sum()) for b in blocks]))
    others = _others(data, blocks, best, search)
    return Noise(
        tuple(residuals.tolist()), drift, len(blocks), _floors(log, best, search), log.widening, constants=others
    )


def _others(data: Equations, blocks: Sequence[np.ndarray], best: Found, search: Search) -> list[list[float]]:
    """Return the constants by blocks drawn with replacement, which differ where the log says little, or the law is of another form."""
    rng = np.random.default_rng(0)
    drawn = (np.concatenate([blocks[i] for i in rng.integers(0, len(blocks), len(blocks))]) for _ in range(DRAWS))
    return [search.solve(data.of(some), best.law)[: len(TERMS)].tolist() for some in drawn]


def drift_of(totals: np.ndarray) -> float:
    """Return the standard deviation of the pace of a run as long as these blocks together, from the logarithms of theirs.

    Where slow blocks follow slow ones, the means of neighbors differ by more than chance: the largest of these estimates counts.
    """
    most, count = 0.0, len(totals)
    for length in {1, 2, count // 2} - {0}:
        means = np.array([part.mean() for part in np.array_split(totals, max(1, count // length))])
        most = max(most, float((means**2).sum() / max(1, len(means) - 1) / len(means)))
    return float(np.sqrt(most))


def _floors(log: Log, best: Found, search: Search) -> dict[str, float]:
    """Return, for TTFT, TPOT and latency, how far off statistics of requests are that the law was not fitted to, in logarithms."""
    known = np.flatnonzero(np.isfinite(log.first) & np.isfinite(log.last))
    cut = int(known[len(known) // 2])
    early = Search(log.until(cut), best.scenario, search.tick, search.usual)
    half = early.settle(best.law, best.scenario.host, MORE_ROUNDS)
    way = Trajectory(log, half.scenario, search.until)
    among = np.isfinite(log.first) & np.isfinite(log.last) & np.isfinite(way.first) & np.isfinite(way.last)
    among[:cut] = False
    if not among.any():
        return dict.fromkeys(("TTFT", "TPOT", "latency"), UNKNOWN_ERROR)
    real, simulated = measured(log, log.first, log.last, among), measured(log, way.first, way.last, among)
    off: dict[str, list[float]] = {}
    for name, value in real.items():
        off.setdefault(name.split()[1], []).append(float(np.log(max(simulated[name], 1e-9) / max(value, 1e-9))))
    return {kind: float(np.sqrt(np.mean(np.square(some)))) for kind, some in off.items()}


def _doubts(log: Log, best: Found, known: int) -> Iterator[str]:
    """Yield what makes the law a guess."""
    rows, slots = held(log, log.first, log.last)[0], best.scenario.engine.slots
    if rows > MORE * slots + 1:  # times of the client are a little late
        total = "with the sum over all engines if the server is data-parallel"
        yield f"{rows} requests of the log run at once, but slots is {slots}. Use --slots, {total}"
    if best.errors["latency"] > DOUBTFUL:
        yield (
            f"single requests of the log itself are off by {best.errors['latency']:.1%} of the mean latency (bound {DOUBTFUL:.0%}): "
            f"no law of this scheduler explains it. {CHECK}"
        )
    late = best.errors["ttft"] * float(np.nanmean(log.first - log.at))
    pace = float(np.nanmedian((log.last - log.first) / np.maximum(1, log.output - 1)))
    if best.errors["ttft"] > DOUBTFUL and late > max(pace, SHORTEST):
        yield (
            f"first tokens of the log itself are off by {late:.2f} s on average, more than a step of {pace:.3f} s. "
            f"{CHECK}"
        )
    if known < FEW:
        yield f"only {known} requests have times, but a reliable fit needs {FEW}. Use a longer log"
