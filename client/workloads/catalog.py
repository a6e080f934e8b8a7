"""What is sent, by name: prompts and lengths of each workload, drawn from one seed.

The same seed gives the same prompts, lengths and times, byte for byte, and another rate sends the same prompts.
Lengths are in tokens; those of papers with longer contexts are scaled to 1,024, and their line says so.
"""

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..data import Planned, PromptData
from . import traces
from .arrivals import Arrivals
from .corpus import CONTEXT, Corpus, fitted

LONGEST_ANSWER = CONTEXT // 2
# Mooncake's prompts are eight and more times as long as the context.
BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Sample:
    """What one request says; `at` only where a trace tells when."""

    prompt: str
    num_tokens: int
    user: str = ""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Draw:
    """What a workload draws with: how many, from what text, by what chance."""

    count: int
    rng: np.random.Generator
    corpus: Corpus

    def samples(self, prompts: np.ndarray, outputs: np.ndarray) -> list[Sample]:
        """Cut a prompt from the text for each pair of lengths."""
        return [Sample(fitted(self.corpus.piece(self.rng, int(p)), int(o)), int(o)) for p, o in zip(prompts, outputs)]


def original(draw: Draw) -> list[Sample]:
    """The original's README: num_tokens N(100, 33) cut to 1..200, prompts of 8 to 64 words."""
    return _selected(draw, "normal")


def original_buckets(draw: Draw) -> list[Sample]:
    """The original's fairness picture: num_tokens 5, 10 .. 145 equally often, prompts of 8 words."""
    return _selected(draw, "buckets")


def original_code(draw: Draw) -> list[Sample]:
    """The original's code: prompts "Request i", num_tokens 1, 25 or 100."""
    lengths = draw.rng.choice([1, 25, 100], draw.count)
    return [Sample(f"Request {i}", int(n)) for i, n in enumerate(lengths)]


def anyscale(draw: Draw, cap: int = 512) -> list[Sample]:
    """Anyscale 2023, scaled: prompts of 512 tokens, outputs exponential (mean 128) up to CAP (512)."""
    lengths = np.rint(draw.rng.exponential(128, draw.count))
    while (outside := (lengths > cap) | (lengths < 1)).any():
        lengths[outside] = np.rint(draw.rng.exponential(128, int(outside.sum())))
    return draw.samples(np.full(draw.count, min(512, CONTEXT - cap)), lengths)


def orca(draw: Draw) -> list[Sample]:
    """Orca (OSDI'22): prompts U{32..512}, outputs U{1..128} tokens."""
    prompts = draw.rng.integers(32, 513, draw.count)
    return draw.samples(prompts, draw.rng.integers(1, 129, draw.count))


def fastgen(draw: Draw, mean: int = 60) -> list[Sample]:
    """DeepSpeed-FastGen, halved: prompts N(600, 30 %), outputs N(MEAN (60), 30 %)."""
    prompts = np.clip(np.rint(draw.rng.normal(600, 180, draw.count)), 16, 900)
    outputs = np.rint(draw.rng.normal(mean, 0.3 * mean, draw.count))
    return draw.samples(prompts, np.clip(outputs, 1, CONTEXT - prompts))


def shared_prefix(draw: Draw, prefixes: int = 10, length: int = 256) -> list[Sample]:
    """K (10) system prompts of P (256) tokens, one of them before each question; outputs U{1..128}."""
    shared = [draw.corpus.piece(draw.rng, length) for _ in range(prefixes)]
    chosen = draw.rng.integers(0, prefixes, draw.count)
    questions = draw.rng.integers(8, 65, draw.count)
    outputs = draw.rng.integers(1, 129, draw.count)
    return [
        Sample(fitted(f"{shared[k]}\n\n{draw.corpus.piece(draw.rng, int(q))}", int(n)), int(n), f"prefix-{k}")
        for k, q, n in zip(chosen, questions, outputs)
    ]


def multi_turn(draw: Draw, turns: int = 5) -> list[Sample]:
    """Chats of T (5) turns: each prompt begins with all before it and a stand-in for the answer."""
    chats = math.ceil(draw.count / turns)
    words = draw.rng.integers(0, 1 << 30, chats)
    said = np.zeros(chats, int)
    samples = []
    for _ in range(turns):
        for chat in range(chats):
            question, answer = int(draw.rng.integers(10, 41)), int(draw.rng.integers(16, 97))
            said[chat] += question
            prompt = draw.corpus.at(int(words[chat]), int(said[chat]))
            samples.append(Sample(fitted(prompt, answer), answer, f"chat-{chat}"))
            said[chat] += answer
    return samples[: draw.count]


def fixed(draw: Draw, prompt: int = 128, output: int = 64) -> list[Sample]:
    """Prompts of P (128) tokens, outputs of N (64)."""
    return draw.samples(np.full(draw.count, prompt), np.full(draw.count, output))


WORKLOADS: dict[str, Callable[..., list[Sample]]] = {
    "original": original,
    "original-buckets": original_buckets,
    "original-code": original_code,
    "anyscale": anyscale,
    "orca": orca,
    "fastgen": fastgen,
    "shared-prefix": shared_prefix,
    "multi-turn": multi_turn,
    "fixed": fixed,
}
FORMS = {
    "anyscale": "anyscale[:CAP]",
    "fastgen": "fastgen[:MEAN]",
    "shared-prefix": "shared-prefix[:K:P]",
    "multi-turn": "multi-turn[:T]",
    "fixed": "fixed[:P:N]",
}
MOST = {"anyscale": (512,), "fastgen": (400,), "shared-prefix": (10_000, 700), "multi-turn": (50,),
        "fixed": (1000, 1000)}  # fmt: skip
TRACE_LINE = "lengths and times of a trace, times F; longer requests than the context are cut"


def describe() -> list[tuple[str, str]]:
    """Give each workload's form and its line of documentation."""
    lines = [(FORMS.get(name, name), (f.__doc__ or "").partition("\n")[0]) for name, f in WORKLOADS.items()]
    return [*lines, ("trace:FILE[:F]", TRACE_LINE)]


def _selected(draw: Draw, selection: str) -> list[Sample]:
    return [Sample(*s) for s in PromptData(draw.count, None, selection, draw.rng).prompts]


@dataclass(slots=True)
class Plan:
    """A run that is drawn: what leaves when, in which way, and what is to be said about it."""

    planned: list[Planned]
    arrivals: Arrivals
    notes: list[str] = field(default_factory=list)


def check(spec: str) -> None:
    """Raise ValueError when there is no such workload or its numbers cannot be."""
    if not spec.startswith("trace:"):
        _parse(spec)
    elif not Path(_trace_file(spec)[0]).is_file():
        raise ValueError(f"trace {_trace_file(spec)[0]!r} does not exist. Use trace:FILE or trace:FILE:F")


def _parse(spec: str) -> tuple[str, list[int]]:
    name, *words = spec.split(":")
    if name not in WORKLOADS:
        near = difflib.get_close_matches(name, WORKLOADS, 1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown workload {name!r}.{guess} Use one of {', '.join(WORKLOADS)}, trace:FILE")
    most = MOST.get(name, ())
    form = FORMS.get(name, name)
    if len(words) > len(most):
        raise ValueError(f"{spec!r} has too many numbers. Use {form}")
    numbers = []
    for word, highest in zip(words, most):
        if not (word.isdecimal() and 1 <= int(word) <= highest):
            raise ValueError(f"{spec!r} has {word!r}. Use {form}, numbers from 1 to {highest:,}")
        numbers.append(int(word))
    if name == "fixed" and len(numbers) == 2 and sum(numbers) > CONTEXT:
        raise ValueError(f"{spec!r} has {sum(numbers):,} tokens, but the context holds {CONTEXT:,}. Use fewer")
    return name, numbers


def draw(spec: str, count: int | None, arrivals: Arrivals, seed: int, corpus: Corpus) -> Plan:
    """Draw a whole run from one seed; `count` None takes all of a trace.

    Prompts and arrivals have generators of their own: another rate sends the same prompts.
    """
    prompt_seed, arrival_seed = np.random.SeedSequence(seed).spawn(2)
    rng = np.random.default_rng(prompt_seed)
    notes: list[str] = []
    if spec.startswith("trace:"):
        file, speed = _trace_file(spec)
        samples, notes = _replayed(Path(file), Draw(count or 0, rng, corpus))
        if arrivals.kind == "trace":
            arrivals = Arrivals("trace", speed)
    else:
        name, numbers = _parse(spec)
        samples = WORKLOADS[name](Draw(count or 100, rng, corpus), *numbers)
    if arrivals.kind == "trace":
        times = [sample.at / arrivals.value for sample in samples]
    else:
        times = arrivals.times(len(samples), np.random.default_rng(arrival_seed))
    planned = [Planned(i, at, s.prompt, s.num_tokens, s.user) for i, (at, s) in enumerate(zip(times, samples))]
    return Plan(planned, arrivals, notes)


def _trace_file(spec: str) -> tuple[str, float]:
    """Split `trace:FILE:F`; F is 1 unless the last part is a number above 0."""
    file, colon, last = spec.removeprefix("trace:").rpartition(":")
    try:
        speed = float(last) if colon else math.nan
    except ValueError:
        speed = math.nan
    return (file, speed) if 0 < speed < math.inf else (spec.removeprefix("trace:"), 1.0)


def _replayed(path: Path, draw: Draw) -> tuple[list[Sample], list[str]]:
    trace = traces.read(path, draw.count or None)
    samples, cut, blocks = [], 0, 0
    for row in trace.rows:
        output = min(row.num_tokens, LONGEST_ANSWER)
        asked = BLOCK_TOKENS * len(row.blocks) or row.prompt_tokens
        prompt = min(asked, CONTEXT - output)
        cut += (prompt, output) != (asked, row.num_tokens)
        blocks += bool(row.blocks)
        if row.blocks:
            # Equal blocks give equal text, so that a prefix cache finds what it would.
            text = "\n".join(draw.corpus.at(b * 7919, BLOCK_TOKENS) for b in row.blocks)
        else:
            text = row.prompt or draw.corpus.piece(draw.rng, prompt)
        samples.append(Sample(fitted(text, output), output, row.user, row.at))
    notes = trace.notes()
    if blocks:
        notes.append(f"the trace's blocks of 512 tokens are replayed as {BLOCK_TOKENS} each")
    if cut:
        notes.append(
            f"{cut} of {len(samples)} requests of the trace are longer than the context: outputs cut "
            f"to {LONGEST_ANSWER}, prompts to what is left of {CONTEXT:,}"
        )
    return samples, notes


def trace_lines(planned: Sequence[Planned]) -> list[dict[str, object]]:
    """Give a run as the lines of a trace file of our own."""
    return [
        {"at": p.at, "prompt": p.prompt, "num_tokens": p.num_tokens} | ({"user": p.user} if p.user else {})
        for p in planned
    ]
