"""The engine without HTTP: seconds of a decode step and of a prefill, and the fraction of the machine's limit.

    python -m dev.benchmarks.engine --load-format dummy --json dev/benchmarks/results/engine.json

Decode steps run over pages of random content, as the cost of a step does not depend on it. Each figure is the median
of many steps; the limit is computed from the bandwidth and the arithmetic rate of the same run. A second table says
where the time goes; "linear / limit" is the least time of the linear layers over theirs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from dev.benchmarks import machine as measured
from dev.benchmarks import parts, report
from dev.benchmarks.offline import decoding
from generate import machine, quantize
from generate.cpu.blocks import CBlocks
from generate.params import GREEDY
from generate.runner import ModelRunner
from models import weights
from models.sources import catalog
from policies import get_policy
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence


def make_runner(args: argparse.Namespace, tokens: int) -> tuple[ModelRunner, str]:
    """Load the model with room for `tokens` tokens of KV."""
    resolved = catalog.resolve(args.model, args.load_format)
    dtype = machine.choose_dtype(args.dtype, torch.device("cpu"), quantize=args.quantize)
    quantize.check(args.quantize, dtype, torch.device("cpu"))
    model = weights.load(resolved, dtype, as_blocks=quantize.kept_kinds(args.quantize, resolved))
    kv_dtype = machine.choose_kv_dtype(args.kv_dtype, dtype, model.head.device)
    runner = ModelRunner(model, tokens // machine.PAGE_SIZE + 2, machine.PAGE_SIZE, kv_dtype, args.quantize)
    for pool in (runner.keys, runner.values):
        noise = _noise(1 << 16, kv_dtype)
        flat = pool.view(-1)
        whole = len(flat) // len(noise) * len(noise)
        flat[:whole].view(-1, len(noise)).copy_(noise)
        flat[whole:] = 0
    return runner, resolved.name


def weights_of(runner: ModelRunner) -> str:
    """Return what most weights of linear layers are rounded to, or the kind of their blocks in the model's file."""
    return runner.kinds[0] if runner.quantize == quantize.AS_STORED else runner.quantize


def _noise(size: int, dtype: torch.dtype) -> Tensor:
    """Return numbers to attend to; in an 8-bit pool, whose scales are float32, any byte may be in a scale."""
    if dtype == torch.int8:
        return torch.randint(16, 64, (size,), dtype=dtype)  # four of these are a float32 of 1e-29 to 1
    return torch.randn(size).to(dtype)


def repeats(sequences: list[Sequence]) -> Iterator[Plan]:
    """Yield steps that decode one token of each sequence, each a repetition of the first, as most of a server are."""
    for number in itertools.count(1):
        yield Plan(number, 0.0, sequences, [1] * len(sequences), repeats=number > 1)


def time_decode(runner: ModelRunner, sequences: list[Sequence], seconds: float) -> list[float]:
    """Return the seconds of steps that decode one token of each sequence."""
    times: list[float] = []
    began, steps = time.perf_counter(), repeats(sequences)
    while len(times) < 8 or time.perf_counter() - began < seconds:
        plan, start = next(steps), time.perf_counter()
        runner.forward(plan)
        times.append(time.perf_counter() - start)
    return times[2:]


def split(runner: ModelRunner, found: list[dict[str, float]], rows: int, limits: tuple[float, float]) -> dict[str, Any]:
    """Return the median milliseconds of each part of some steps, and how near linear layers are to the machine's limit."""
    if not found:
        return {"parts_ms": None, "linear_fraction": None}
    medians = {name: statistics.median(step[name] for step in found) for name in parts.NAMES}
    weights = measured.layer_weights(runner.config)
    least = measured.linear_seconds(weights, runner.dtype, rows, *limits, weights_of(runner))
    return {
        "parts_ms": {name: 1e3 * seconds for name, seconds in medians.items()},
        "linear_fraction": least / medians["linear"],
    }


def pieces(runner: ModelRunner, tokens: int, chunk: int) -> Iterator[Plan]:
    """Yield the steps of one prompt of `tokens` tokens in pieces of `chunk`, each after the one before is computed."""
    seq = decoding(runner, 1, tokens, 0.0)[0]
    seq.output_ids, seq.computed = [], 0
    while seq.pending:
        count = min(chunk, seq.pending)
        yield Plan(1, 0.0, [seq], [count])
        seq.computed += count


def time_prefill(runner: ModelRunner, tokens: int, chunk: int) -> float:
    """Return the seconds of one prompt."""
    start = time.perf_counter()
    for plan in pieces(runner, tokens, chunk):
        runner.forward(plan)
    return time.perf_counter() - start


def time_prefix(runner: ModelRunner, tokens: int, chunk: int) -> dict[str, float]:
    """Return the seconds to the first token of two requests that share their first `tokens` tokens."""
    pool = PagePool(runner.keys.shape[1], runner.page_size)
    scheduler = Scheduler(get_policy("dynamic", max_batch_size=1), pool, chunk)
    vocab = runner.config.vocab_size
    prefix = [j * 31 % vocab for j in range(tokens)]
    seconds = []
    for i in range(2):
        seq = Sequence([*prefix, i + 1], 1, id=str(i), sampling=GREEDY)
        scheduler.add(seq)
        began = time.perf_counter()
        while not scheduler.is_idle:
            scheduler.step(runner.forward, time.perf_counter)
        seconds.append(time.perf_counter() - began)
    return {"tokens": tokens, "cached": seq.cached, "first_ms": seconds[0] * 1e3,
            "second_ms": seconds[1] * 1e3, "ratio": seconds[1] / seconds[0]}  # fmt: skip


def measure_decode(runner: ModelRunner, batch: int, context: int, args: argparse.Namespace) -> dict[str, float]:
    """Time decode steps in rounds, with the machine's limits measured before and after each round.

    The speed of a shared machine changes from second to second, so each round is compared with its own limit.
    """
    sequences = decoding(runner, batch, context, args.temperature)
    limits = [machine_limits(runner)]
    times, fractions = [], []
    for _ in range(args.rounds):
        median = statistics.median(time_decode(runner, sequences, args.seconds / args.rounds))
        limits.append(machine_limits(runner))
        bandwidth, rate = (sum(pair) / 2 for pair in zip(*limits[-2:]))
        limit = measured.limit_seconds(
            runner.config, runner.dtype, batch, context, bandwidth, rate, runner.keys.dtype, weights_of(runner)
        )
        times.append(median)
        fractions.append(limit / median)
    median = statistics.median(times)
    found = parts.of_steps(runner, repeats(sequences), 10) if isinstance(runner.blocks, CBlocks) else []
    return {
        "batch": batch, "context": context, "step_ms": median * 1e3, "best_ms": min(times) * 1e3,
        "tokens_per_s": batch / median, "fraction": statistics.median(fractions),
        "bandwidth_gb_s": statistics.median(b for b, _ in limits) / 1e9,
        "rate_gflop_s": statistics.median(r for _, r in limits) / 1e9, **split(runner, found, batch, limits[-1]),
    }  # fmt: skip


def machine_limits(runner: ModelRunner) -> tuple[float, float]:
    """Return the bytes and operations per second of the machine now, with the weights of this model."""
    return measured.bandwidth(), measured.arithmetic_rate(runner.dtype, weights_of(runner))


def run(args: argparse.Namespace) -> dict[str, Any]:
    machine.use_threads(args.threads)
    most = max(b * (c + 128) for b in args.batch for c in args.context)
    runner, name = make_runner(args, max(most, 2048))
    rows = []
    for context in args.context:
        for batch in args.batch:
            rows.append(measure_decode(runner, batch, context, args))
    prefill = []
    for tokens in args.prefill:
        seconds = statistics.median(time_prefill(runner, tokens, args.chunk) for _ in range(4))
        prompts = (pieces(runner, tokens, args.chunk) for _ in range(4 if isinstance(runner.blocks, CBlocks) else 0))
        found = [parts.total(parts.of_steps(runner, prompt)) for prompt in prompts]
        more = split(runner, found, tokens, machine_limits(runner))
        prefill.append({"tokens": tokens, "ms": seconds * 1e3, "tokens_per_s": tokens / seconds, **more})
    return {
        "model": name, "load_format": args.load_format,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "quantize": runner.quantize,
        "kv_dtype": str(runner.keys.dtype).removeprefix("torch."), "attention": runner.attention,
        "temperature": args.temperature, "decode": rows, "prefix": time_prefix(runner, 512, args.chunk),
        "prefill": prefill, "chunk": args.chunk,
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    console = Console(stderr=True)
    rows = [
        (str(r["batch"]), str(r["context"]), f"{r['step_ms']:.1f}", f"{r['tokens_per_s']:.0f}",
         f"{r['bandwidth_gb_s']:.0f}", f"{r['rate_gflop_s']:.0f}", f"{r['fraction']:.2f}")
        for r in result["decode"]
    ]  # fmt: skip
    heads = ("batch", "context", "ms a step", "tokens/s", "GB/s", "GFLOP/s", "of the limit")
    title = f"{result['model']} {result['dtype']}, weights {result['quantize']}, {torch.get_num_threads()} threads"
    report.show(title, heads, rows, left=0)
    show_parts(
        [(f"{r['batch']} x {r['context']}", r) for r in result["decode"]]
        + [(f"prompt {r['tokens']}", r) for r in result["prefill"]]
    )
    for r in result["prefill"]:
        console.print(f"prefill {r['tokens']} tokens: {r['ms']:.0f} ms, {r['tokens_per_s']:.0f} tokens/s")
    p = result["prefix"]
    console.print(
        f"first token with {p['tokens']} shared tokens: {p['first_ms']:.0f} ms, then {p['second_ms']:.1f} ms "
        f"({p['cached']} cached, ratio {p['ratio']:.3f})"
    )


def show_parts(steps: list[tuple[str, dict[str, Any]]]) -> None:
    """Show where the time of steps went; nothing for a model whose layers do not run in C."""
    rows = [
        (name, *(f"{step['parts_ms'][part]:.2f}" for part in parts.NAMES), f"{step['linear_fraction']:.2f}")
        for name, step in steps if step["parts_ms"]
    ]  # fmt: skip
    if rows:
        report.show("milliseconds of a step", ("step", *parts.NAMES, "linear / limit"), rows, left=0)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def main() -> None:
    parser = report.parser("engine", __doc__)
    report.add_model(parser)
    parser.add_argument("--batch", type=numbers, default=[1, 4, 16, 32, 64], help="batch sizes, separated by commas")
    parser.add_argument("--context", type=numbers, default=[128, 512], help="context lengths, separated by commas")
    parser.add_argument("--prefill", type=numbers, default=[64, 512], help="prompt lengths, separated by commas")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a prompt in a step")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the sampling")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0: one per core")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds per figure")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per figure, each with its own limit")
    args = parser.parse_args()
    result = run(args)
    show(result)
    report.finish("engine", result, args.json)


if __name__ == "__main__":
    main()
