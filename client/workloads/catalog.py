"""The workloads by name: prompts, lengths and arrival times, drawn from one seed.

The client sends what `draw` returns, and the simulator simulates it. The same seed gives the same prompts, lengths and
times, byte for byte, and another rate sends the same prompts. Lengths are in tokens (see `corpus`); those of papers
with longer contexts are scaled to 1,024, and their line says so. Requests are cut to the context of the served model.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..data import Planned, PromptData, redrawn
from . import agentic, chats, programs, traces
from .arrivals import Arrivals, check_span
from .corpus import USUAL_CONTEXT, Corpus, fitted, split
from .sample import Draw, Sample, Workload, parse

SCALED = 1024  # tokens to which the lengths of papers with longer contexts are scaled
# Mooncake's prompts are eight and more times as long as the context.
BLOCK_TOKENS = 64


def original(draw: Draw) -> list[Sample]:
    """The original's README: num_tokens N(100, 33) cut to 1..200, prompts of 8 to 64 words."""
    return _selected(draw, "normal")


def original_buckets(draw: Draw) -> list[Sample]:
    """The original's fairness picture: num_tokens 5, 10 .. 145 equally often, prompts of 8 words."""
    return _selected(draw, "buckets")


def original_code(draw: Draw) -> list[Sample]:
    """The original's code: prompts of 4 tokens (as "Request 17" has), num_tokens 1, 25 or 100."""
    outputs = draw.rng.choice([1, 25, 100], draw.count)
    return draw.samples(np.full(draw.count, 4), outputs)


def clipped_normal(draw: Draw) -> list[Sample]:
    """Outputs N(100.5, 33.2) conditioned on 1..200, prompts U{10..80} tokens."""
    outputs = redrawn(lambda n: draw.rng.normal(100.5, 33.2, n), draw.count, 1, 200)
    return draw.samples(draw.rng.integers(10, 81, draw.count), outputs)


def uniform(draw: Draw) -> list[Sample]:
    """Outputs U{2..129}, prompts of 16 tokens."""
    return draw.samples(np.full(draw.count, 16), draw.rng.integers(2, 130, draw.count))


def short_long(draw: Draw) -> list[Sample]:
    """Nine short chats (32 tokens in, 16 out) to one long (256 in, 400 out)."""
    is_long = draw.rng.random(draw.count) < 0.1
    return draw.samples(np.where(is_long, 256, 32), np.where(is_long, 400, 16))


def anyscale(draw: Draw, cap: int = 512) -> list[Sample]:
    """Anyscale 2023, scaled: prompts of 512 tokens, outputs exponential (mean 128) up to CAP (512)."""
    return draw.samples(np.full(draw.count, 512), anyscale_outputs(draw.rng, draw.count, cap))


def anyscale_outputs(rng: np.random.Generator, count: int, cap: int) -> np.ndarray:
    """Draw round(Exp(128)), again where it is above the cap, and at least 1."""
    lengths: np.ndarray = np.maximum(1, redrawn(lambda n: rng.exponential(128, n), count, 0, cap))
    return lengths


def orca(draw: Draw) -> list[Sample]:
    """Orca (OSDI'22): prompts U{32..512}, outputs U{1..128} tokens."""
    prompts = draw.rng.integers(32, 513, draw.count)
    return draw.samples(prompts, draw.rng.integers(1, 129, draw.count))


def fastgen(draw: Draw, mean: int = 60) -> list[Sample]:
    """DeepSpeed-FastGen, halved: prompts N(600, 30 %), outputs N(MEAN (60), 30 %)."""
    prompts = np.clip(np.rint(draw.rng.normal(600, 180, draw.count)), 16, 900)
    outputs = np.rint(draw.rng.normal(mean, 0.3 * mean, draw.count))
    return draw.samples(prompts, np.clip(outputs, 1, SCALED - prompts))


def shared_prefix(draw: Draw, prefixes: int = 10, length: int = 256) -> list[Sample]:
    """K (10) system prompts of P (256) tokens, one of them before each question; outputs U{1..128}."""
    shared = [draw.corpus.piece(draw.rng, min(length, draw.context)) for _ in range(prefixes)]
    chosen = draw.rng.integers(0, prefixes, draw.count)
    questions = draw.rng.integers(8, 65, draw.count)
    outputs = draw.rng.integers(1, 129, draw.count)
    return [
        Sample(f"{shared[k]} {draw.corpus.piece(draw.rng, int(q))}", int(n), f"prefix-{k}")
        for k, q, n in zip(chosen, questions, outputs)
    ]


def drawn_turns(draw: Draw, turns: int = 5) -> list[Sample]:
    """Chats of T (5) turns of random lengths: each prompt repeats the chat so far, with filler for the answers."""
    number = -(-draw.count // turns)
    places = draw.rng.integers(0, 1 << 30, number)
    lengths = np.zeros(number, int)
    samples = []
    for _ in range(turns):
        for chat in range(number):
            question, answer = int(draw.rng.integers(10, 41)), int(draw.rng.integers(16, 97))
            lengths[chat] += question
            prompt = draw.corpus.at(int(places[chat]), int(lengths[chat]))
            samples.append(Sample(prompt, answer, f"chat-{chat}"))
            lengths[chat] += answer
    return samples[: draw.count]


def fixed(draw: Draw, prompt: int = 128, output: int = 64) -> list[Sample]:
    """Prompts of P (128) tokens, outputs of N (64)."""
    if prompt + output > draw.context:
        raise ValueError(
            f"fixed:{prompt}:{output} has {prompt + output:,} tokens, but the context holds {draw.context:,}. Use fewer"
        )
    return draw.samples(np.full(draw.count, prompt), np.full(draw.count, output))


def llm_mock(draw: Draw, output: int = 0) -> list[Sample]:
    """llm-mock: prompts U{20..399}, outputs of 50 + min(prompt, 500) / 5 tokens, or N (100 in its other form)."""
    prompts = draw.rng.integers(20, 400, draw.count).tolist()
    return [Sample(draw.corpus.piece(draw.rng, p), output or llm_mock_output(p)) for p in prompts]


def llm_mock_output(prompt: int) -> int:
    """Return how many tokens llm-mock generates after a prompt."""
    return 50 + min(prompt, 500) // 5


def _selected(draw: Draw, selection: str) -> list[Sample]:
    return [Sample(*s) for s in PromptData(draw.count, None, selection, draw.rng, draw.context).prompts]


# By name, which is the form without its numbers.
WORKLOADS = {
    workload.form.partition("[")[0]: workload
    for workload in (
        Workload(original, "original"),
        Workload(original_buckets, "original-buckets"),
        Workload(original_code, "original-code"),
        Workload(clipped_normal, "clipped-normal"),
        Workload(uniform, "uniform"),
        Workload(short_long, "short-long"),
        Workload(anyscale, "anyscale[:CAP]", (512,)),
        Workload(orca, "orca"),
        Workload(fastgen, "fastgen[:MEAN]", (400,)),
        Workload(shared_prefix, "shared-prefix[:K:P]", (10_000, 1_000_000)),
        Workload(drawn_turns, "drawn-turns[:T]", (50,)),
        Workload(fixed, "fixed[:P:N]", (1_000_000, 1_000_000)),
        Workload(llm_mock, "llm-mock[:N]", (1_000_000,)),
        Workload(chats.chat, "chat[:CAP]", (1_000_000,)),
        Workload(chats.multi_turn, "multi-turn[:T:Z]", (50, 600)),
        Workload(chats.agent, "agent[:T]", (1000,)),
    )
}
KNOWN = {**WORKLOADS, **programs.KINDS}
OWN_LENGTHS = ("chat", "multi-turn")  # the model alone knows how long the answers are
SHAREGPT_LINE = "first messages of the chats in a ShareGPT JSON file; the model ends its answers"
LLM_MOCK_LINE = "the same messages as plain prompts, with the outputs of llm-mock"
TRACE_LINE = "lengths and times of a trace, times F; longer requests than the context are cut"


def describe() -> list[tuple[str, str]]:
    """Return each workload's form and its line of documentation."""
    lines = [(each.form, (each.draw.__doc__ or "").partition("\n")[0]) for each in KNOWN.values()]
    return [*lines, ("sharegpt:FILE", SHAREGPT_LINE), ("llm-mock:FILE", LLM_MOCK_LINE), ("trace:FILE[:F]", TRACE_LINE)]


@dataclass(slots=True)
class Plan:
    """The requests of a run, in order, with their arrival process, the seed that drew them, and notes for the user."""

    planned: list[Planned]
    arrivals: Arrivals
    seed: int
    notes: list[str] = field(default_factory=list)


def check(spec: str) -> None:
    """Raise ValueError for an unknown workload, or numbers out of bounds."""
    if (file := _sharegpt_file(spec)) is not None:
        form = f"{spec.partition(':')[0]}:FILE"
    elif spec.startswith("trace:"):
        file, form = _trace_file(spec)[0], "trace:FILE or trace:FILE:F"
    else:
        parse(spec, KNOWN)
        return
    if not Path(file).is_file():
        problem = "is a folder. Use a file" if Path(file).is_dir() else "does not exist. Check the path"
        raise ValueError(f"{spec.partition(':')[0]} file {file!r} {problem} in {form}")


def own_times(spec: str | None) -> Arrivals | None:
    """Return the arrival process of a workload that has its own times; None for the others."""
    return Arrivals("trace", 1.0) if (spec or "").startswith("trace:") else None


def is_chat(spec: str | None) -> bool:
    """Whether a workload sends chat messages."""
    return (spec or "").partition(":")[0] in (*OWN_LENGTHS, "agent", *programs.KINDS, "sharegpt")


def is_programs(spec: str | None) -> bool:
    """Whether a workload draws programs, and counts these."""
    return (spec or "").partition(":")[0] in programs.KINDS


def draw(
    spec: str, count: int | None, arrivals: Arrivals, seed: int, corpus: Corpus, context: int = USUAL_CONTEXT
) -> Plan:
    """Draw a whole run from one seed; `count` None takes all of a trace. Requests are cut to `context` tokens.

    Prompts and arrivals have generators of their own: another rate sends the same prompts. The rate of conversations is
    that of their first turns, and that of programs, which `count` counts, that of their begins.
    """
    if is_programs(spec):
        calls = programs.drawn(spec, count or 100, arrivals, seed)
        written, left_out = programs.written(calls, Draw(len(calls), np.random.default_rng(seed), corpus, context))
        return Plan(written, arrivals, seed, left_out)
    prompt_seed, arrival_seed = np.random.SeedSequence(seed).spawn(2)
    rng = np.random.default_rng(prompt_seed)
    notes: list[str] = []
    if spec.startswith("trace:"):
        file, speed = _trace_file(spec)
        samples, notes = _replayed(Path(file), Draw(count or 0, rng, corpus, context))
        if arrivals.kind == "trace":
            arrivals = Arrivals("trace", speed)
    elif (path := _sharegpt_file(spec)) is not None:
        samples, notes = chats.sharegpt(Path(path), Draw(count or 100, rng, corpus, context))
        if spec.startswith("llm-mock"):
            samples = [Sample(s.prompt, llm_mock_output(len(split(s.prompt)))) for s in samples]
    else:
        name, numbers = parse(spec, WORKLOADS)
        samples = WORKLOADS[name].draw(Draw(count or 100, rng, corpus, context), *numbers)
    lengths = [fitted(s.prompt, s.num_tokens, context) for s in samples]
    cut = sum(fit != (s.prompt, s.num_tokens) for fit, s in zip(lengths, samples))
    if cut:
        notes.append(
            f"{cut} of {len(samples)} requests are longer than the context of {context:,} tokens: outputs cut to what is left "
            f"or {context // 2:,}, prompts to what is left then"
        )
    firsts = [s for s in samples if s.call is None or not s.call.after]
    if arrivals.kind == "trace":
        at_times = [sample.at / arrivals.value for sample in firsts]
        check_span(at_times, f"Play the trace faster than {arrivals.value:g} times, or leave out its last requests")
        times = iter(at_times)
    else:
        times = iter(arrivals.times(len(firsts), np.random.default_rng(arrival_seed)))
    planned, at = [], 0.0
    for i, (s, fit) in enumerate(zip(samples, lengths)):
        at = next(times) if s.call is None or not s.call.after else at
        planned.append(Planned(i, at, *fit, s.user, s.chat, s.call))
    return Plan(planned, arrivals, seed, notes)


def _sharegpt_file(spec: str) -> str | None:
    """Return the file of `sharegpt:FILE` or `llm-mock:FILE`, None for another workload."""
    name, _, rest = spec.partition(":")
    return rest if name == "sharegpt" or (name == "llm-mock" and rest.strip("0123456789:")) else None


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
    samples, blocks = [], 0
    for row, call in agentic.of(trace.rows, draw.count or None):
        # Equal blocks give equal text, so that a prefix cache finds the same beginnings.
        sizes = [min(BLOCK_TOKENS, row.block, row.prompt_tokens - i * row.block) for i in range(len(row.blocks))]
        shared = " ".join(draw.corpus.at(block * 7919, size) for block, size in zip(row.blocks, sizes))
        # No longer than the context: lengths in a trace may be in millions.
        drawn = shared or row.prompt or draw.corpus.piece(draw.rng, min(row.prompt_tokens, draw.context + 1))
        blocks = max(blocks, row.block if shared else 0)
        samples.append(Sample(drawn, row.num_tokens, row.user, call.at if call else row.at, call=call))
    notes = trace.notes()
    if blocks > BLOCK_TOKENS:
        notes.append(f"the trace's blocks of {blocks} tokens are replayed as {BLOCK_TOKENS} each")
    return samples, notes
