"""A server as a log of its requests shows it, and its file, which is a cost model with the requests beside it.

This module must not know how a law is found.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from costs import cost as costs
from costs.cost import Affine, Cost, to_dict
from simulate.engines import known
from simulate.engines.known import Kind
from simulate.logs.log import Log, Note
from simulate.measured import intervals
from simulate.measured.intervals import Noise, of_cost
from simulate.scenario import Chosen, Scenario
from simulate.simulator import Run
from simulate.trace import Seen, Trace

MORE = 1.1  # times as many tokens or requests as a log shows are a guess
SETTINGS = ("slots", "tokens_per_step", "kv_tokens", "page_size", "prefix_cache")


@dataclass(frozen=True)
class Fitted:
    """A server as a log shows it: the scenario of its scheduler on these requests, and how sure its law is.

    `sources` says where each setting is from: option, log, usual or fitted. `misfit` are the errors of single requests that the
    law was fitted to, `seen` the sizes of its steps (`costs.steps.seen_in`). With `doubts`, figures are not to be trusted.
    """

    scenario: Scenario[Trace]
    noise: Noise
    log: Log
    kind: Kind
    sources: dict[str, str]
    misfit: dict[str, float]
    seen: dict[str, int] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()

    @property
    def law(self) -> Affine:
        assert isinstance(self.scenario.cost, Affine)
        return self.scenario.cost

    def guesses(self, first: np.ndarray, last: np.ndarray) -> str:
        """Return a warning if predicted times of the log's requests need more memory than is known to be there, else ""."""
        if self.sources.get("kv_tokens") != "usual":
            return ""
        needed, shown = (held(self.log, *times)[1] for times in ((first, last), (self.log.first, self.log.last)))
        if needed <= MORE * shown:
            return ""
        return (
            f"the KV memory is not known: these requests hold up to {needed:,} tokens at once, and what was fitted holds "
            f"{shown:,}. They may wait for memory. Use --kv-tokens"
        )

    def replay(self, law: Cost) -> Run:
        """Simulate the log with another law."""
        return replace(self.scenario, cost=law).serve(*self.scenario.policies)


def figures(run: Run) -> dict[str, float]:
    """Return the statistics of a run that get intervals, in seconds."""
    return statistics(run.ttft, run.latency, run.tokens)


def statistics(ttft: np.ndarray, latency: np.ndarray, tokens: np.ndarray) -> dict[str, float]:
    """Return mean and percentiles of TTFT, TPOT (time per token after the first) and latency, in seconds."""
    several = tokens > 1
    kinds = {"TTFT": ttft, "TPOT": (latency - ttft)[several] / (tokens[several] - 1), "latency": latency}
    found = (intervals.statistics(kind, values, (50, 90, 95, 99)) for kind, values in kinds.items())
    return {name: value for each in found for name, value in each.items()}


def measured(log: Log, first: np.ndarray, last: np.ndarray, among: np.ndarray) -> dict[str, float]:
    """Return the same statistics of a log with these times, of the requests that `among` (N, bool) chooses."""
    return statistics((first - log.at)[among], (last - log.at)[among], log.output[among])


def held(log: Log, first: np.ndarray, last: np.ndarray) -> tuple[int, int]:
    """Return the most requests between their first and last tokens at one time, and the most tokens that these had by then."""
    known = np.flatnonzero(np.isfinite(first) & np.isfinite(last))
    first, last, prompt, output = (each[known] for each in (first, last, log.prompt, log.output))
    half = (last - first) / np.maximum(output - 1, 1) / 2  # a step, by which times of the client may be late
    rows = tokens = 0
    for at in first:
        among = (first <= at) & (last > at + half)
        done = (at - first[among]) / (last - first)[among]
        rows, tokens = max(rows, int(among.sum())), max(tokens, int((prompt[among] + done * output[among]).sum()))
    return max(rows, 1), max(tokens, log.longest)


def save(path: Path, fitted: Fitted) -> None:
    """Write the file that `--cost FILE.json`, `advise` and `load` read."""
    scenario, log = fitted.scenario, fitted.log
    content = {
        "cost": to_dict(fitted.law),
        "host": asdict(scenario.host),
        "machine": {"max_tokens_per_step": scenario.engine.tokens_per_step, "server": dict(log.server)},
        "engine": fitted.kind.name,
        "policy": scenario.policies[0].name,
        "policy_options": dict(scenario.policies[0].options),
        "settings": {name: getattr(scenario.engine, name) for name in SETTINGS},
        "sources": fitted.sources,
        "misfit": fitted.misfit,
        "seen": fitted.seen,
        "doubts": fitted.doubts,
        "noise": asdict(fitted.noise),
        "notes": log.notes,
        "requests": [
            {**seen._asdict(), "first": _time(first), "last": _time(last)}
            for seen, first, last in zip(log.trace.seen, log.first, log.last)
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content) + "\n")


def _time(seconds: float) -> float | None:
    return round(float(seconds), 6) if np.isfinite(seconds) else None


def load(path: Path) -> Fitted:
    """Read what `save` wrote; ValueError for another file."""
    law, host, facts = costs.load(path)
    noise = of_cost(str(path))
    if "requests" not in facts or noise is None:
        raise ValueError(f"{str(path)!r} has no requests. Use a file of './eb fit LOG --out FILE.json'")
    rows = [dict(row) for row in facts["requests"]]
    first, last = (
        np.array([np.nan if (at := row.pop(name)) is None else at for row in rows]) for name in ("first", "last")
    )
    log = Log(Trace([Seen(**row) for row in rows]), first, last, server=facts["machine"]["server"],
              notes=tuple(Note(*note) for note in facts["notes"]))  # fmt: skip
    kind, chosen = known.get(facts["engine"]), Chosen(facts["policy"], facts["policy_options"])
    engine = replace(kind.engine, **facts["settings"])
    scenario = Scenario((chosen,), engine, law, host, log.trace, (chosen.policy(engine.slots),))
    return Fitted(scenario, noise, log, kind, facts["sources"], facts["misfit"], facts["seen"], tuple(facts["doubts"]))
