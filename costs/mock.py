"""A model without weights: it takes the time that a cost model predicts, and its tokens are filler.

In the server it sleeps, so that `--model mock:llm-mock` or `mock:FILE.json` serves the real API at the predicted speed,
or, with `@10` behind the name, ten times as fast; in the simulator it moves the clock. The tokens depend on the prompt
and the place only, so that an answer is the same whatever else is in the batch; how a request would draw them has no
effect. An answer that has a form is a short text of this form. It must not know tokenizers or HTTP.
"""

from __future__ import annotations

import hashlib
import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from costs import cost as costs
from costs import published
from costs.cost import Cost, Host, Scaled, Sizes
from scheduling.advance import Output, Token, TokenRun, run_of
from scheduling.iteration import Plan
from scheduling.sequence import Sequence as Request

PREFIX = "mock:"
PAGE_SIZE = 16
ANSWER = 100  # tokens of an answer to which its request sets no limit
GPT2 = Sizes()
IDS = range(GPT2.vocabulary - 1)  # the last would end a text


class Scored(NamedTuple):
    """The log probability of a token, in which all tokens are equally likely."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int = 1


class MockModel:
    """Computes plans in the time that `cost` says, on the clock that `sleep` moves.

    Its steps keep the pace of a GPU that is a step ahead of its host (`generate/gpu/decoder.py`). Where requests go on
    from one step to the next, a sleep that lasted too long comes out of the next one. What the host does between the
    steps comes out of it, too, as far as the next step decodes: its prompts wait for the host. With a `speed` of 10 a
    step takes a tenth of its time. It answers with `ids` alone, and ends an answer without a limit with `end`, after
    `ANSWER` tokens.
    """

    def __init__(
        self,
        cost: Cost | Callable[[Plan], float],
        *,
        name: str = "mock",
        of: str = "a cost model",
        ids: Sequence[int] = IDS,
        end: int | None = None,
        sizes: Sizes = GPT2,
        host: Host | None = None,
        speed: float = 1.0,
        tokens_per_step: int = 2048,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.cost = cost
        self.name, self.of = name, of
        self.ids = ids
        self.end = end
        self.sizes = sizes
        self.host = host or Host()
        self.speed = speed
        self.tokens_per_step = tokens_per_step
        self._sleep = sleep
        self._clock = clock
        self._due = self._ended = math.inf  # when the last step should have ended, and when it did

    @property
    def law(self) -> Cost:
        """The time of its steps on its own clock."""
        assert isinstance(self.cost, Cost)
        return self.cost if self.speed == 1 else Scaled(self.cost, 1 / self.speed)

    @property
    def description(self) -> str:
        """A description of what it does instead of computing."""
        how = f", {self.speed:.3g} times faster" if self.speed > 1 else f", {1 / self.speed:.3g} times slower"
        return f"words are drawn at random; times are those of {self.of}{how if self.speed != 1 else ''}"

    def forward(self, plan: Plan) -> list[Output]:
        """Take the time of a step; return a token for each sequence due, None while its prompt lasts."""
        start = self._clock()
        seconds = self.cost(plan) / self.speed
        known, ids, size = plan.decoding, self.ids, len(self.ids)
        outputs: list[Output] = [  # a plain token at once: this is most of what the host does for a step
            self._output(seq, 0)
            if seq.constrained or seq.open_ended or getattr(seq.sampling, "logprobs", None) is not None
            else ids[_place(seq.prompt_ids[-1], len(seq.output_ids), size)]
            for seq in plan.sequences[:known]
        ]
        outputs += [
            self._output(seq, 0) if count >= seq.pending else None
            for seq, count in zip(plan.sequences[known:], plan.counts[known:])
        ]
        for i, drafts in enumerate(plan.drafts):
            if drafts:
                outputs[i] = self._run(plan.sequences[i], drafts)
        overslept, host = max(0.0, self._ended - self._due), max(0.0, start - self._ended)
        early = min(overslept + min(host, self._seconds_ahead(plan, seconds)), seconds) if _goes_on(plan) else 0.0
        self._due = start + seconds - early
        rest = self._due - self._clock()
        if rest > 0:
            self._sleep(rest)
        self._ended = max(self._due, self._clock())
        return outputs

    def _seconds_ahead(self, plan: Plan, seconds: float) -> float:
        """Return how much of a step's time needs nothing of the host: that of decodes, if it launched all of them ahead.

        A GPU's runner does so for sequences that got a token in the step before, none of which has to wait for a mask.
        """
        decodes = plan.sequences
        if plan.decoding < len(decodes):
            decodes = [seq for seq in decodes if seq.pending == 1 and seq.output_ids]
        before = plan.number - 1
        if plan.drafts or any(seq.constrained or seq.last_iteration != before for seq in decodes):
            return 0.0
        if len(decodes) == len(plan.sequences):
            return seconds
        alone = Plan(plan.number, plan.started_at, decodes, [1] * len(decodes))
        return self.cost(alone) / self.speed if decodes else 0.0

    def token(self, seq: Request, later: int = 0) -> int:
        """Return the token after the next `later` ones: a fixed mixture of the last prompt token and the place."""
        return self._filler(seq, later)[0]

    def _filler(self, seq: Request, later: int) -> tuple[int, int]:
        """Return that token and its place among `ids`, 0 for one of a form and for the end."""
        form = getattr(seq.sampling, "grammar", None)
        made = len(seq.output_ids) + later
        if form is not None:
            text = form.grammar.short_text
            return text[min(made, len(text) - 1)], 0
        if self.end is not None and seq.open_ended and made >= ANSWER and self.end in seq.sampling.banned_ids:
            return self.end, 0  # which is not among these where the request ignores it
        place = _place(seq.prompt_ids[-1], made, len(self.ids))
        return self.ids[place], place

    def _run(self, seq: Request, drafts: list[int]) -> Output:
        """Return the drafts that are right, and the token behind them."""
        ids = run_of(drafts, [self.token(seq, later) for later in range(len(drafts) + 1)])
        outputs = (self._output(seq, later) for later in range(len(ids)))
        return TokenRun(ids, [output.detail for output in outputs if isinstance(output, Token)])

    def _output(self, seq: Request, later: int) -> Output:
        """Return the token after the next `later` ones, with log probabilities if its sampling parameters ask for them."""
        if getattr(seq.sampling, "pooling", None) is not None:
            return Token(0, None, [embedding(seq.prompt_ids, self.sizes.width)])
        wanted = getattr(seq.sampling, "logprobs", None)
        of_prompt = getattr(seq.sampling, "prompt_logprobs", None)
        if wanted is None and of_prompt is None:
            return self._filler(seq, later)[0]
        prompt: list[Scored] = []
        if of_prompt is not None and not seq.output_ids:
            prompt = [self._scored(token, 0, of_prompt) for token in seq.prompt_ids[1:]]
        token, place = self._filler(seq, later)
        own = None if wanted is None else self._scored(token, place, wanted)
        return Token(token, own, prompt)

    def _scored(self, token: int, place: int, wanted: int) -> Scored:
        logprob = -math.log(len(self.ids))
        others = (self.ids[(place + i) % len(self.ids)] for i in range(1, wanted))
        return Scored(token, logprob, tuple((t, logprob) for t in (token, *others))[:wanted])


def _place(last: int, made: int, ids: int) -> int:
    mixed = (last * 2654435761 + made * 40503) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 15)) % ids


def _goes_on(plan: Plan) -> bool:
    """Return whether a request of the step before is in this one, so that the loop had no reason to wait between."""
    return any(0 < seq.last_iteration == plan.number - 1 for seq in plan.sequences)


def embedding(prompt_ids: Sequence[int], width: int) -> array[float]:
    """Return a vector of length 1 in a direction that only a hash of the prompt decides."""
    numbers = [byte - 127.5 for byte in hashlib.shake_128(array("q", prompt_ids)).digest(width)]
    length = math.hypot(*numbers)
    return array("f", [number / length for number in numbers])


def is_mock(name: str) -> bool:
    """Whether a model's name means one without weights."""
    return name.startswith(PREFIX)


def load(name: str, ids: Sequence[int] = IDS, end: int | None = None, context: int = 0) -> MockModel:
    """Return the model that `mock:llm-mock`, `mock:FILE.json` or the bare name means; ValueError with the remedy."""
    cost, speed = _parts(name)
    host, tokens_per_step, sizes = Host(), 2048, GPT2
    if cost.endswith(".json"):
        _, host, facts = costs.load(cost)
        machine = facts.get("machine", {})
        tokens_per_step = machine.get("max_tokens_per_step", tokens_per_step)
        sizes = Sizes.of(machine)
    shown = PREFIX + (Path(cost).name if cost.endswith(".json") else cost)
    return MockModel(
        published.make(cost),
        name=shown if speed == 1 else f"{shown}@{speed:g}",
        of=published.MEASURED.get(cost, f"the cost model {shown.removeprefix(PREFIX)}"),
        ids=ids,
        end=end,
        host=host,
        sizes=replace(sizes, context=context or sizes.context),
        speed=speed,
        tokens_per_step=tokens_per_step,
    )


def absolute(name: str) -> str:
    """Return a name that means the same in any folder: of a file, its whole path."""
    cost, speed = _parts(name)
    whole = str(Path(cost).expanduser().absolute()) if cost.endswith(".json") else cost
    return f"{PREFIX}{whole}" + ("" if speed == 1 else f"@{speed!r}")


def _parts(name: str) -> tuple[str, float]:
    """Return the cost model and the speed that a name means."""
    cost, at, text = name.removeprefix(PREFIX).rpartition("@")
    if not at:
        return text, 1.0
    try:
        speed = float(text)
    except ValueError:
        return f"{cost}@{text}", 1.0  # part of a file's name
    if not 0 < speed < math.inf:
        raise ValueError(f"the speed of {name!r} is {text}, but must be above 0. Use {PREFIX}{cost}@10")
    return cost, speed


def kv_pages(sizes: Sizes, kv_memory: int, slots: int) -> int:
    """Return how many pages to make, the first for padding: room for twice as many whole contexts as slots.

    `kv_memory` bytes hold as many tokens as they would of the calibrated model, and of GPT-2 medium for a named cost
    model. ValueError when they hold no context.
    """
    least = -(-sizes.context // PAGE_SIZE)
    pages = kv_memory // (sizes.kv_bytes * PAGE_SIZE) if kv_memory else 2 * slots * least
    if pages < least:
        raise ValueError(
            f"--kv-memory is {kv_memory:,} bytes, which is too small for a full context of {sizes.context:,} tokens "
            f"of {sizes.kv_bytes:,} bytes each. Set it to {least * PAGE_SIZE * sizes.kv_bytes:,} at least"
        )
    return pages + 1
