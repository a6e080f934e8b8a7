"""Cost models that others measured or published, by name, with their constants and sources.

Times in the sources are mostly ms; here everything is seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from costs.cost import Affine, Cost, Host, Phases, load
from costs.steps import Step
from scheduling.options import nearest


@dataclass(frozen=True)
class LlmMock(Cost):
    """llm-mock: rows x longest row x widest piece / 468000 + 0.06, also for an empty batch.

    468000 = 312 * 1500 (an A100's arithmetic), 0.06 = 120 GB / 2000 GB/s. A batch is a rectangle in both directions,
    so a prefill beside decodes makes all of them pay for it; `ragged` charges each row its own product instead.
    """

    rate: float = 468000.0
    base: float = 0.06
    ragged: bool = False
    name = "llm-mock"

    def seconds(self, step: Step) -> float:
        work = step.work if self.ragged else step.rows * step.longest * step.widest
        return work / self.rate + self.base


@dataclass(frozen=True)
class DistServe(Cost):
    """DistServe's fit of OPT-13B on one A100-80G (its simulator's profile; OSDI 2024).

    Prefill 18.1025 + 0.101912 (sum of p) + 7.1223e-6 (sum of p^2) ms; decode of B rows 19.9347 + 6.26936e-4 (sum of
    contexts) + 0.0385070 B below B = 95, and 7.16619 + 5.79800e-4 (sum) + 0.158311 B from there: the pieces do not meet.
    `memory` scales what memory bandwidth bounds (decode's constant and contexts) for another card. In a mixed step the
    weights are read once: the decode's constant is left out.
    """

    memory: float = 1.0
    name = "distserve-opt13b"

    def seconds(self, step: Step) -> float:
        ms, batch = 0.0, step.decodes
        if step.prefills:
            ms = 18.1025 + 0.101912 * step.prompt + 7.1223e-6 * step.squares
        if batch:
            small = batch < 95
            constant, context, row = (19.9347, 6.26936e-4, 0.0385070) if small else (7.16619, 5.79800e-4, 0.158311)
            ms += self.memory * context * step.context + row * batch
            if not step.prefills:
                ms += self.memory * constant
        return ms / 1000


@dataclass(frozen=True)
class Splitwise(Cost):
    """Splitwise's simulator (ISCA 2024): measured points (tokens in the batch, seconds), a mixed batch x 1.1.

    The points shipped are those of `distserve-opt13b` at contexts of 512; give your own.
    """

    prefill: tuple[tuple[float, float], ...] = (
        (64, 0.024654), (128, 0.031264), (256, 0.044659), (512, 0.072149), (1024, 0.129929),
        (2048, 0.256692),
    )  # fmt: skip
    decode: tuple[tuple[float, float], ...] = (
        (1, 0.020294), (8, 0.022811), (16, 0.025686), (32, 0.031438), (64, 0.042941),
    )  # fmt: skip
    mixed: float = 1.1
    name = "splitwise"
    flat = True

    def seconds(self, step: Step) -> float:
        if not step.prefills:
            return interpolate(self.decode, step.decodes)
        seconds = interpolate(self.prefill, step.tokens)
        return seconds * self.mixed if step.decodes else seconds


@dataclass(frozen=True)
class Constant(Cost):
    """a + b n for n rows, whatever they compute: the closed forms of continuous batching."""

    a: float = 0.008
    b: float = 0.0002
    name = "constant"
    flat = True

    def seconds(self, step: Step) -> float:
        return self.a + self.b * (step.decodes + step.prefills)


# Least squares of the relative errors on data/vtc/cost_profile.json (VTC artifact, OSDI 2024; Llama-2-7B, A10G). A decode
# step errs by 0.8 % in the mean; without the knee, which bounds small batches from below, it errs by 3.5 %.
# tests/simulate/test_costs.py fits them again.
VTC_A10G = Phases(
    base=32.713e-3, row=0.31261e-3, knee=48, context=0.70586e-6, token=0.21087e-3, request=0.5933e-3
)  # fmt: skip

# What was measured for a law, in words.
MEASURED = {"distserve-opt13b": "a 13B model (OPT-13B, A100)", "vtc-a10g": "a 7B model (Llama-2-7B, A10G)"}
MODELS: dict[str, Cost] = {
    "affine": Affine(base=8e-3, token=0.1e-3, row=0.1e-3),
    "llm-mock": LlmMock(),
    "llm-mock-ragged": LlmMock(ragged=True),
    "distserve-opt13b": DistServe(),
    "vtc-a10g": VTC_A10G,
    # SSJF (arXiv 2404.08509): a batch takes 0.1 s + 0.02 s for each token of its longest answer.
    "ssjf": Affine(base=0.02, prefill=0.1),
    "splitwise": Splitwise(),
    "constant": Constant(),
    "oracle-a": Phases(base=8e-3, row=0.2e-3, start=5e-3, request=2e-3),
    "inoue-v100": Constant(a=1.8874e-3, b=0.1438e-3),
}


INVENTED = ("affine", "constant", "llm-mock", "llm-mock-ragged", "oracle-a")  # the times of no machine


def called(name: str) -> str:
    """Return the name of a cost model as tables show it: whether its machine is invented."""
    return f"{name} (an invented machine)" if name in INVENTED else name


def interpolate(points: tuple[tuple[float, float], ...], x: float) -> float:
    """Go through ascending points by straight lines, the outer two lines drawn on, never below the first."""
    if len(points) == 1:
        return points[0][1]
    i = min(max(1, bisect_left(points, (x,))), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 + (y1 - y0) * (max(x, points[0][0]) - x0) / (x1 - x0)


def make(name: str, options: Mapping[str, float] | None = None) -> Cost:
    """Return the cost model with that name, or in a file that `calibrate` wrote, with some constants changed."""
    model: Any = load(name)[0] if name.endswith(".json") else MODELS.get(name)
    if model is None:
        raise ValueError(
            f"unknown cost model {name!r}.{nearest(name, MODELS)} Use one of: {', '.join(MODELS)}, or a file of "
            "'./eb simulate calibrate'"
        )
    options = options or {}
    known = [key for key, value in vars(model).items() if isinstance(value, int | float)]
    if name == "affine" and {"token", "row"} & options.keys():
        model, options, known = Affine(8e-3), {"token": 0.1e-3, "row": 0.1e-3, **options}, [*known, "token", "row"]
    for key in options:
        if key not in known:
            raise ValueError(f"cost model {name!r} has no constant {key!r}. Use {', '.join(known)}")
    changed: Cost = replace(model, **options)
    return changed


def host_of(name: str) -> Host:
    """Return the host overheads in a file that `calibrate` wrote; a named model has none."""
    return load(name)[1] if name.endswith(".json") else Host()
