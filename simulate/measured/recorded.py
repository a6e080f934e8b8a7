"""A cost file from the steps in a record of `./eb vllm serve --record`. It must not know vLLM: a record is lines of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any, cast

import numpy as np

from costs.cost import Host, to_dict
from costs.steps import Step, seen_in, step_of_members
from scheduling.iteration import Member, begin_of
from simulate.measured import observed_law
from simulate.measured.least_squares import TERMS, law_of

FEWEST_STEPS = 30  # a fit needs this many


def cost_of(path: Path) -> dict[str, Any]:
    """Return a cost file's content; ValueError if this is no record or has too few steps. The record may still grow."""
    try:
        head, *lines = map(json.loads, path.read_text("utf-8").rpartition("\n")[0].splitlines())
        masked = {line["arrive"]: line["prompt"] for line in lines if line.get("constrained")}
        steps, host = _steps(sorted((line for line in lines if "members" in line), key=lambda line: line["t"]), masked)
        sizes = head["slots"], head["tokens"], head["pages"] * head["page_size"]
        if not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(f"slots, tokens and tokens of all pages are {sizes}, but must be whole and above 0")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        why = f"{type(error).__name__}: {error}"  # the repr of a decoding error would show the whole file
        raise ValueError(f"cannot read {str(path)!r}: {why}. Use a file of ./eb vllm serve --record") from None
    if len(steps) < FEWEST_STEPS:
        raise ValueError(f"{str(path)!r} has {len(steps)} steps, but at least {FEWEST_STEPS} are needed. Record more")
    found, _, basis = observed_law.law(steps, host.sigma, "")
    law, noise, seen = (
        cast(Any, found),
        observed_law.noise(found, steps, basis["misfit"]),
        seen_in(step for step, _ in steps),
    )
    cost = law_of(law.factor * np.array([getattr(law.law, name) for name in TERMS]), law.law)
    return {
        "cost": to_dict(cost), "host": asdict(host), "mape": basis["mean_error"], "drift": basis["misfit"], "seen": seen,
        "steps": len(steps), "machine": dict(zip(("max_batch_size", "max_tokens_per_step", "kv_tokens"), sizes)),
        "noise": asdict(noise) | {"seen": seen},
    }  # fmt: skip


def _steps(lines: list[dict[str, Any]], masked: dict[str, int]) -> tuple[list[tuple[Step, float]], Host]:
    """Return the steps with their seconds, the mean time between two of them, and whether they overlap."""
    steps, gaps, ended, goes_on, late = list[tuple[Step, float]](), list[float](), 0.0, False, False
    for line in lines:
        begin, overlaps = begin_of(line["t"], ended)
        late, end = late or overlaps, line["t"] + line["seconds"]
        gaps += [begin - ended] * goes_on
        step = step_of_members([Member(**row) for row in line["members"]], False, masked)
        if not isfinite(end) or type(step.tokens) is not int:
            raise ValueError(f"step {line['n']} ends at {end} with {step.tokens} tokens, which are no times and counts")
        if step.tokens and end > begin:
            steps.append((step, end - begin))
        ended, goes_on = end, len(line["left"]) < len(line["members"])
    return steps, Host(sigma=sum(gaps) / len(gaps) if gaps else 0.0, late=float(late))
