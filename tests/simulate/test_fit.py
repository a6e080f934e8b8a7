"""Laws found from logs alone: of servers that are simulated, whose laws are known, and of two that others measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costs.cost import Affine, Host
from simulate.__main__ import main
from simulate.engines import known
from simulate.fitting.fit import fit
from simulate.fitting.fitted import Fitted, load, measured, save
from simulate.logs.checks import checked
from simulate.logs.log import Log, Request
from simulate.logs.read import read
from simulate.scenario import Chosen, Engine
from simulate.simulator import simulate
from simulate.trace import Seen, Trace
from tests.support import ROOT
from tests.support.simulate import run_command

DENSE = Affine(base=0.02, decode=4e-5, prompt=1e-4, prefill=0.005, context=1e-7, pair=1e-8)
LAWS = {
    "dense": DENSE,
    "experts": Affine(base=0.005, decode=4e-5, prompt=1e-4, prefill=0.005, context=1e-7, experts=0.02, chosen=0.06),
    "knee": Affine(base=0.02, decode=4e-5, prompt=2e-5, prefill=0.005, context=1e-7, hinge=2e-4, knee=256),
}
SIZES = {"slots": 48, "tokens_per_step": 1024, "kv_tokens": 200_000}


def served(law: Affine = DENSE, count: int = 200, rate: float = 3.0, **settings: Any) -> list[Request]:
    """Return what a client of vLLM with this law would have logged."""
    rng = np.random.default_rng(3)
    at = np.cumsum(rng.exponential(1 / rate, count)) * np.where(np.arange(count) % 50 < 30, 0.6, 1.4)
    prompts = np.clip(rng.lognormal(5, 1, count), 8, 1500).astype(int)
    answers = np.clip(rng.lognormal(4.5, 0.8, count), 2, 500).astype(int)
    trace = Trace([Seen(float(t), int(p), int(a), None) for t, p, a in zip(np.sort(at), prompts, answers)])
    engine = Engine(**{**SIZES, **settings})
    run = simulate(engine.scheduler(Chosen("simulate.engines.vllm")), trace.sequences(), law, Host())
    return [
        Request(s.arrived_at, len(s.prompt_ids), len(s.output_ids), s.first_token_at or 0, s.finished_at or 0, s.id)
        for s in run.sequences
    ]


def fitted(requests: list[Request], engine: str = "vllm", **given: Any) -> Fitted:
    return fit(checked(requests), known.get(engine), {**SIZES, **given})


@pytest.fixture(scope="module")
def dense() -> Fitted:
    return fitted(served())


@pytest.mark.parametrize("name", LAWS)
def test_a_fit_finds_the_step_times_of_a_law(name: str, dense: Fitted) -> None:
    found = dense if name == "dense" else fitted(served(LAWS[name]))
    steps = found.scenario.serve(*found.scenario.policies, records=True).iterations
    assert not found.doubts
    assert len(steps) > 500
