"""Cost models: the laws of a step's time, engines that pad or do not, and the file of a calibrated model.

A cost model is a callable from `scheduling.iteration.Plan` to seconds. It sees a plan only through `Step`, a few sums,
so the simulator can go through thousands of equal decode steps without a plan for each. It must not know clocks,
policies or how it was fitted. `published.py` has the models by name.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import InitVar, asdict, dataclass
from pathlib import Path
from typing import Any

from costs.steps import Step, decoding, prefilling, step_of
from scheduling.iteration import Plan


class Cost:
    """A cost model: override `seconds`."""

    name = "cost"

    @property
    def flat(self) -> bool:
        """Whether a decode step of the same rows costs the same however long they are."""
        return False

    def seconds(self, step: Step) -> float:
        """Return how long a step takes."""
        raise NotImplementedError

    def step(self, plan: Plan) -> Step:
        """Return what this engine computes for a plan."""
        return step_of(plan)

    def __call__(self, plan: Plan) -> float:
        rows = plan.decoding
        if rows and self.flat and rows == len(plan.sequences) and not (plan.drafts or plan.held):
            # Most steps of most simulations: nothing but the number of rows can matter.
            step, masks = decoding(rows, 0), [seq.constrained for seq in plan.sequences].count(True)
            return self.seconds(step._replace(masks=masks) if masks else step)
        return self.seconds(self.step(plan))


@dataclass(frozen=True)
class Wrapped(Cost):
    """Another engine for the same law; override what it changes."""

    law: Cost

    @property
    def flat(self) -> bool:
        return self.law.flat

    def seconds(self, step: Step) -> float:
        return self.law.seconds(step)

    def step(self, plan: Plan) -> Step:
        return self.law.step(plan)


class Aligned(Wrapped):
    """Keys and values are a rectangle, as without pages: each decode reads a context as long as the step's longest row."""

    name = "aligned"

    def seconds(self, step: Step) -> float:
        return self.law.seconds(step._replace(context=max(step.context, step.decodes * step.longest)))


@dataclass(frozen=True)
class Scaled(Wrapped):
    """A machine that takes `factor` times as long."""

    factor: float
    name = "scaled"

    def seconds(self, step: Step) -> float:
        return self.law.seconds(step) * self.factor


@dataclass(frozen=True)
class Affine(Cost):
    """The default law, in seconds: D rows decode and P prompt tokens are computed; no constant is below 0.

    T = base + decode D + prompt P + start [rows with prompt tokens] + prefill [any prompt token]
        + context (sum over decodes) + pair (sum over prompt pieces of c (k + (c + 1) / 2))
        + mask_row_s [tokens sampled under the mask of a grammar]
        + hinge max(0, D + P - knee) + experts (1 - (1 - chosen)^(D + P))

    Above `knee` tokens a device is bound by arithmetic. `experts` is the time to read all experts of a mixture; a token
    needs the share `chosen` of them, such as 8/128. Without prompt tokens, D is rounded up to the next of `buckets`, the
    sizes of recorded graphs. `token` and `row` of older files add to decode and prompt, and to decode and start.
    """

    base: float = 0.0
    decode: float = 0.0
    prompt: float = 0.0
    start: float = 0.0
    prefill: float = 0.0
    context: float = 0.0
    pair: float = 0.0
    mask_row_s: float = 0.0
    hinge: float = 0.0
    experts: float = 0.0
    knee: int = 0
    chosen: float = 0.0
    buckets: tuple[int, ...] = ()
    token: InitVar[float] = 0.0
    row: InitVar[float] = 0.0
    name = "affine"

    def __post_init__(self, token: float, row: float) -> None:
        object.__setattr__(self, "decode", self.decode + token + row)
        object.__setattr__(self, "prompt", self.prompt + token)
        object.__setattr__(self, "start", self.start + row)
        object.__setattr__(self, "buckets", tuple(sorted(self.buckets)))  # a list in a file

    @property
    def flat(self) -> bool:
        return not self.context

    def rows(self, step: Step) -> int:
        """Return how many decoding rows are computed: those of the smallest graph that has room, if one has."""
        if step.prompt or step.decodes > self.buckets[-1]:
            return step.decodes
        return self.buckets[bisect_left(self.buckets, step.decodes)]

    def seconds(self, step: Step) -> float:
        rows = self.rows(step) if self.buckets else step.decodes
        seconds = self.base + self.decode * rows + self.context * step.context
        if step.masks:
            seconds += self.mask_row_s * step.masks
        if step.prompt:
            seconds += self.prefill + self.prompt * step.prompt + self.start * step.prefills + self.pair * step.pairs
        if self.hinge and rows + step.prompt > self.knee:
            seconds += self.hinge * (rows + step.prompt - self.knee)
        if self.experts:
            seconds += self.experts * (1 - (1 - self.chosen) ** (rows + step.prompt))
        return seconds


@dataclass(frozen=True)
class Phases(Cost):
    """Prefill and decode charged apart, in seconds; a mixed step pays both (constants of both, too).

    decode: base + row max(0, B - knee) + context (sum). Up to `knee` rows the weights are read anyway and bound the step.
    prefill: start + token (sum of tokens) + request (prompts) + square (sum of p^2)
    """

    base: float = 0.0
    row: float = 0.0
    context: float = 0.0
    start: float = 0.0
    token: float = 0.0
    request: float = 0.0
    square: float = 0.0
    knee: float = 0.0
    name = "phases"

    @property
    def flat(self) -> bool:
        return not self.context

    def seconds(self, step: Step) -> float:
        seconds = 0.0
        if step.decodes:
            seconds = self.base + self.context * step.context
            if step.decodes > self.knee:
                seconds += self.row * (step.decodes - self.knee)
        if step.prefills:
            seconds += self.start + self.token * step.prompt + self.request * step.prefills + self.square * step.squares
        return seconds


@dataclass(frozen=True)
class Host:
    """What the computer around the model adds, in seconds.

    alpha0 before a request is seen (HTTP, tokenizing), alpha1 after its last token, alpha2 for each token handed out,
    sigma for each turn of the loop; an idle loop looks for work every `poll` seconds, at once when that is 0, and begins `wake`
    later, with all requests that have come meanwhile. The very first
    step takes `first_step` more, as a server compiles or records then. A step takes `receive` more for each request that is
    seen while it runs: threads that read and tokenize it take the processor from the step. Where `late` is 1, a request that
    joins others is computed one step later: it is still on its way when the next one begins.
    """

    alpha0: float = 0.0
    alpha1: float = 0.0
    alpha2: float = 0.0
    sigma: float = 0.0
    poll: float = 0.0
    first_step: float = 0.0
    receive: float = 0.0
    wake: float = 0.0
    late: float = 0.0

    def seconds(self, tokens: int) -> float:
        """Return what the host adds to a step that hands out `tokens` tokens."""
        return self.sigma + self.alpha2 * tokens


@dataclass(frozen=True)
class Transfer:
    """How keys and values go from one memory to another."""

    bytes_per_token: int
    bytes_per_second: float

    def seconds(self, tokens: int) -> float:
        return tokens * self.bytes_per_token / self.bytes_per_second


@dataclass(frozen=True)
class Sizes:
    """What a model without weights has beside its times: context, token ids, bytes of keys and values per token, width.

    The defaults are those of GPT-2 medium in 16 bit, for which the named cost models stand.
    """

    context: int = 1024
    vocabulary: int = 50257
    kv_bytes: int = 96 * 1024
    width: int = 1024  # of the hidden state

    @classmethod
    def of(cls, machine: dict[str, Any]) -> Sizes:
        """Read the description of the calibrated model in a file of `calibrate`; older files have no sizes."""
        return cls(**{name: int(machine[name]) for name in ("context", "vocabulary", "kv_bytes") if name in machine})


def load(path: str | Path) -> tuple[Affine, Host, dict[str, Any]]:
    """Read a file of `calibrate`: cost, host overheads, and all its facts."""
    try:
        facts = json.loads(Path(path).read_text("utf-8-sig"))
        constants = dict(facts["cost"])
        if constants.pop("kind") != Affine.name:
            raise ValueError("its law is one of an older version, or of none")
        model = Affine(**constants)
        model.seconds(prefilling(1))  # TypeError here when a constant is not a number
        host = {key: float(value) for key, value in facts.get("host", {}).items()}
        return model, Host(**host), facts
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or (
            f"it has no {error}" if isinstance(error, KeyError) else str(error)
        )
        raise ValueError(
            f"cannot read a cost model from {str(path)!r}: {reason}. Make one with "
            "'./eb simulate calibrate --out FILE.json'"
        ) from error


def to_dict(cost: Affine) -> dict[str, Any]:
    """Return what `load` reads."""
    return {"kind": cost.name, **asdict(cost)}
